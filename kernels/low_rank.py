"""Low-rank updates of a linear layer's results: rows of some adapter get scale * B A x more.

Hu et al., "LoRA" (arXiv 2106.09685), with the scale multiplied into B. The rows of a step are
grouped by adapter, as in Punica and S-LoRA (arXiv 2310.18547, 2311.03285).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import linear


class LowRankPart(NamedTuple):
    """B of some consecutive outputs."""

    up: Tensor
    """[outputs, rank], with the scale in it."""
    first_output: int
    first_rank: int
    """Where its ranks begin among those of ``LowRank.down``."""


class LowRank(NamedTuple):
    """What one adapter has for one linear layer, whose outputs may have several parts."""

    down: Tensor
    """[ranks, inputs]: A of each part, one after another."""
    parts: tuple[LowRankPart, ...]

    @property
    def num_bytes(self) -> int:
        return self.down.nbytes + sum(part.up.nbytes for part in self.parts)


class AdapterRows(NamedTuple):
    """The rows of a step that have one adapter."""

    adapter: int
    """Its number, from 1 on."""
    rows: Tensor
    """[n] int64, ascending."""
    padded: Tensor
    """[m] int64: the same, and behind them any rows, so that a product gives a row the same bits in
    every step."""


def add_low_rank(
    out: Tensor,
    x: Tensor,
    groups: Sequence[AdapterRows],
    updates: Sequence[LowRank | None],
    summed: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """``out`` with the updates of its rows added in place.

    Args:
        out: [N, outputs]; rows without an adapter are not touched.
        x: [N, inputs]: what the layer was given.
        groups: each adapter of the step once.
        updates: by the number of the adapter; ``None``: it has none for this layer.
        summed: adds up what the ranks that divide ``inputs`` have.
    """
    for adapter, rows, padded in groups:
        update = updates[adapter]
        if update is None:
            continue
        shrunk = linear(x.index_select(0, padded), update.down)
        if summed is not None:
            shrunk = summed(shrunk)
        for up, first, rank in update.parts:
            part = shrunk[:, rank : rank + up.shape[1]].contiguous()
            added = linear(part, up)[: len(rows)]
            out[:, first : first + len(up)].index_add_(0, rows, added)
    return out
