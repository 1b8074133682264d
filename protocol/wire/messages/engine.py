"""What an engine holds and how its device likes its steps: said once, by its worker."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from typing import Literal

import msgspec

FULL_ATTENTION = "full"
WINDOW_ATTENTION = "window"
CHUNK_ATTENTION = "chunk"


NO_BLOCK = -1
"""In a block table: nothing attends to these positions any more."""


class LayerGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Layers that share one block table for each slot."""

    kind: str = FULL_ATTENTION
    """``FULL_ATTENTION``: each position attends to all before it. ``WINDOW_ATTENTION``: to the
    latest ``window`` positions, its own included. ``CHUNK_ATTENTION``: to those of its own chunk of
    ``window`` positions."""
    window: int = 0

    def blocks_behind(self, position: int, block_size: int) -> int:
        """Blocks at the beginning of a table that nothing from this position on attends to."""
        if self.kind == CHUNK_ATTENTION:
            return position // self.window * self.window // block_size
        return max(0, position - self.window + 1) // block_size if self.window else 0

    def needed(self, blocks: int, block_size: int, most_step: int) -> int:
        """How many blocks a table of this length holds at once, at most; most_step: positions that
        one step computes of a sequence at most. They may begin anywhere in a block."""
        if not self.window:
            return blocks
        return min(blocks, -(-(self.window - 1 + most_step) // block_size) + 1)


class Adapter(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An adapter that an engine has for its model: low-rank matrices (LoRA), or a soft prompt."""

    name: str
    """By which clients choose it; empty: none may any more, and open requests have it."""
    digest: str
    """Of its content. Requests name it, and so do the KV blocks that it has a part in: files that
    change make another adapter of it."""
    virtual_tokens: int = 0
    """Rows of a soft prompt, which stand ahead of each prompt; 0: it is none."""


TaskPrompts = Literal["chunks", "all", "whole"]
"""How prompts are computed of which a task other than to generate makes something. ``chunks``: as
any prompt. ``all``: in chunks, but every position anew, since the cache has K and V alone.
``whole``: in one step, since each position attends to all others; such an engine keeps no K and V,
and a prompt may be as long as ``max_model_len``."""


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
    """The most tokens that a row of a step without chunks may bring, 255 at most: it computes as
    many positions. Beside chunks a row brings one."""
    groups: list[LayerGroup] = []
    """Each has block tables of its own, and all draw on the same blocks; none: one group of full
    attention."""
    task_prompts: TaskPrompts = "chunks"
    micro_batches: int = 1
    """A step decodes the slots of one of so many micro-batches: those whose numbers leave the same
    rest when divided by it. So the stages of a pipeline compute different ones at a time."""

    @property
    def longest_task_prompt(self) -> int:
        """Tokens of a prompt that a task gets, at most."""
        return self.max_model_len - (self.task_prompts != "whole")

    def sequence_blocks(self, tokens: int) -> int:
        """Blocks that a sequence of so many positions holds at once, at most, over all groups."""
        length = -(-tokens // self.block_size)
        groups = self.groups or _ONE_FULL
        most_step = self.max_num_batched_tokens
        return sum(group.needed(length, self.block_size, most_step) for group in groups)

    @property
    def all_kv_tokens(self) -> int:
        """Positions that KV memory holds in all sequences together; with several groups of layers,
        in sequences of ``max_model_len``."""
        if not self.groups:
            return self.num_blocks * self.block_size
        most = self.sequence_blocks(self.max_model_len)
        return self.num_blocks * self.max_model_len // most if most else 0

    @property
    def kv_tokens(self) -> int:
        """Positions of the longest sequence, up to ``max_model_len``, that KV memory holds, in
        whole blocks."""
        groups = tuple(self.groups) or _ONE_FULL
        sizes = self.num_blocks, self.block_size, self.max_num_batched_tokens, self.max_model_len
        return _longest_held(groups, *sizes)


_ONE_FULL = (LayerGroup(),)


@lru_cache(maxsize=64)
def _longest_held(
    groups: tuple[LayerGroup, ...], num_blocks: int, block_size: int, most_step: int, limit: int
) -> int:
    """``EngineSizes.kv_tokens``, which is asked for with each request and is always the same."""

    def needed(length: int) -> int:
        return sum(group.needed(length, block_size, most_step) for group in groups)

    return block_size * bisect_right(range(1, -(-limit // block_size) + 1), num_blocks, key=needed)


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
