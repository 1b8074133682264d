"""What attention over the paged KV cache is planned from, and what a backend of it gives.

A step's rows are *spans*: a decode row, or the rows of a chunk. A backend turns spans into
batches once a step, on the host; every layer then attends with these batches. The reference of
``attention.py`` is one backend, torch's SDPA of ``sdpa_attention.py`` the other; a step may have
batches of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class CacheShape(NamedTuple):
    """One layer's key or value cache, and how queries read it."""

    num_kv_heads: int
    num_blocks: int
    block_size: int
    head_dim: int
    num_query_heads: int
    dtype: torch.dtype
    exact: bool = False
    """Whether the reference's batches over this cache are exact (see ``attention.py``)."""
    window: int = 0
    """Positions that each query sees, its own included; 0: all up to its own."""
    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap); 0: they stay."""
    chunk: int = 0
    """Positions of a chunk: a query sees those of its own chunk alone; 0: there are none."""
    first: int = 0
    """The first position that is seen by queries behind it; those ahead of it see themselves."""

    @property
    def local(self) -> bool:
        """Whether queries do not see all positions up to their own."""
        return self.window > 0 or self.chunk > 0 or self.first > 0

    def first_seen(self, positions: IntArray) -> IntArray:
        """The first position that a query at each of these sees."""
        first = np.minimum(positions, self.first)
        if self.window:
            first = np.maximum(first, positions - self.window + 1)
        if self.chunk:
            first = np.maximum(first, positions // self.chunk * self.chunk)
        return first


class QuerySpans(NamedTuple):
    """Consecutive rows of a step at consecutive positions of one sequence, B times."""

    rows: IntArray
    """[B] the span's first row in the step."""
    starts: IntArray
    """[B] that row's position."""
    counts: IntArray | None
    """[B] rows of the span; ``None``: one each."""
    block_tables: IntArray
    """[B, W] with W as ``attention.plan_groups`` takes it, every entry a valid block id, those
    past the context's blocks of a block without NaN or infinity."""
    besides: BoolArray | None = None
    """[B, W] blocks that the span's queries see besides their window or chunk, as far as they lie
    ahead of it: those of a layer's pattern, or a mask of the caller's. ``None``: none."""


class RowPlaces(NamedTuple):
    """Where the rows of a batch come from and go to."""

    num_rows: int
    """Rows of the batch, padding included."""
    sources: Tensor | None
    """[num_rows] int64: the step's row of each one (padding repeats a real one); ``None``: the rows
    0 … num_rows - 1."""
    kept: Tensor | None
    """Which of these are no padding; ``None``: all."""
    targets: Tensor
    """int64: the step's rows that the kept results go to."""


class PlannedBatch(Protocol):
    """Rows that attend together."""

    @property
    def places(self) -> RowPlaces: ...

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """query: [places.num_rows, Hq, D], any strides but 1 between elements of a head; key_cache,
        value_cache: [Hkv, num_blocks, block_size, D] of its dtype; sinks: [Hq], a score more for
        each head, which stands for no value. Returns [num_rows, Hq * D].

        Raises ``ValueError`` for sinks where the backend has none."""


class AttentionBackend(Protocol):
    """One way to attend."""

    name: str
    """For the log: ``by …``."""
    finite_keys: bool
    """Whether unused places of a sequence's blocks must be finite in K too, not in V alone."""

    def plan(
        self, spans: QuerySpans, shape: CacheShape, device: torch.device
    ) -> Sequence[PlannedBatch]:
        """Batches that cover each row of the spans once."""


def row_places(rows: IntArray, real: BoolArray | None, device: torch.device) -> RowPlaces:
    """rows: [count] the step's row of each row of a batch; real: [count] False for padding."""
    index = torch.from_numpy(np.ascontiguousarray(rows)).to(device)
    sources: Tensor | None = index
    if int(rows[0]) == 0 and bool((rows == np.arange(len(rows))).all()):
        sources = None
    if real is None or real.all():
        return RowPlaces(len(rows), sources, None, index)
    picked = np.flatnonzero(real)
    kept = torch.from_numpy(picked).to(device)
    return RowPlaces(len(rows), sources, kept, torch.from_numpy(rows[picked]).to(device))
