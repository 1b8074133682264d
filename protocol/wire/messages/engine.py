"""What an engine holds and how its device likes its steps: said once, by its worker."""

from __future__ import annotations

import msgspec

FULL_ATTENTION = "full"
WINDOW_ATTENTION = "window"


NO_BLOCK = -1
"""In a block table: nothing attends to these positions any more."""


class LayerGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Layers that share one block table for each slot."""

    kind: str = FULL_ATTENTION
    """``FULL_ATTENTION``: each position attends to all before it. ``WINDOW_ATTENTION``: to the
    latest ``window`` positions, its own included."""
    window: int = 0


class EngineSizes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sizes of one engine; all zero for other services and until the model is loaded."""

    num_blocks: int = 0
    """KV blocks that the scheduler may hand out: ids 0 … ``num_blocks`` - 1."""
    block_size: int = 0
    """Positions in one KV block."""
    max_num_seqs: int = 0
    """Slots: 0 … ``max_num_seqs`` - 1."""
    max_num_batched_tokens: int = 0
    """Positions computed in one step, prefill and decode together."""
    max_model_len: int = 0
    vocab_size: int = 0
    max_row_tokens: int = 1
    """The most tokens that a row of a step may bring, 255 at most; each row computes as many
    positions."""
    groups: list[LayerGroup] = []
    """Each has block tables of its own, and all draw on the same blocks; none: one group of full
    attention."""


class StepShape(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the scheduler should know of a device to plan good steps for it. The defaults are for
    devices that nobody has measured, such as CPUs and the null device."""

    row_units: list[int] = []
    """Flat pairs (rows, multiple), the most rows first: from so many rows on, a step is computed in
    whole multiples, and what is missing is padding."""
    chunk_tokens: int = 1024
    """Prefill tokens beside decode rows that are worth a step, where one takes long."""
    prefill_factor: float = 1.25
    """Prefill may take this many times as long as the decode rows while one prompt waits."""
    prefill_factor_each: float = 0.4
    """What each further prompt that waits adds to ``prefill_factor``."""
    most_prefill_factor: float = 4.4
    """Prefill takes at most this many times as long as the decode rows, however many wait."""
    certain_share: float = 0.6
    """The share of its predicted time that prefill takes for certain."""
    round_trip_seconds: float = 0.0015
    """From a result to the worker's next plan, at worst: steps that are planned beyond the running
    one must last that long, or the device waits."""
    lead_seconds: float = 0.015
    """Ahead of a step's end the next one is planned at the latest: so long do scheduler and worker
    take for the largest plans."""
