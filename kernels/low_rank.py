"""Low-rank updates of a linear layer's results: rows of some adapter get scale * B A x more.

Hu et al., "LoRA" (arXiv 2106.09685), with the scale multiplied into B. The rows of a step are
grouped by adapter, as in Punica and S-LoRA (arXiv 2310.18547, 2311.03285).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
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

    def to(self, device: torch.device) -> LowRank:
        """The same there."""
        parts = tuple(part._replace(up=part.up.to(device)) for part in self.parts)
        return LowRank(self.down.to(device), parts)


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
        groups: each adapter of the step once; on all ranks in the same order.
        updates: by the number of the adapter; ``None``: it has none for this layer.
        summed: adds up what the ranks that divide ``inputs`` have. It is called once.
    """
    found = [(group, update) for group in groups if (update := updates[group.adapter]) is not None]
    shrunk = [linear(x.index_select(0, group.padded), update.down) for group, update in found]
    if summed is not None and shrunk:
        shrunk = _summed_at_once(shrunk, summed)
    for (group, update), small in zip(found, shrunk, strict=True):
        rows = group.rows
        for up, first, rank in update.parts:
            part = small[:, rank : rank + up.shape[1]].contiguous()
            added = linear(part, up)[: len(rows)]
            out[:, first : first + len(up)].index_add_(0, rows, added)
    return out


class StackedLowRank(NamedTuple):
    """What each of several adapters has for one linear layer, filled up with zeros to one rank."""

    down: Tensor
    """[adapters, parts * rank, inputs]: A of each part."""
    up: Tensor
    """[adapters, outputs, rank]: B, with the scale in it."""
    parts: tuple[int, ...]
    """Outputs of each part, three at most."""

    @property
    def num_bytes(self) -> int:
        return self.down.nbytes + self.up.nbytes


def add_stacked(out: Tensor, x: Tensor, layer: StackedLowRank, adapters: Sequence[int]) -> Tensor:
    """The reference of ``penstock.kernels.gpu.low_rank``: ``out`` with the updates of its rows
    added in place.

    out: [N, outputs]; x: [N, inputs]; adapters: of each row, -1: none.
    """
    rank = layer.up.shape[2]
    for row, adapter in enumerate(adapters):
        if adapter < 0:
            continue
        small = layer.down[adapter].float() @ x[row].float()
        ups = torch.split(layer.up[adapter].float(), list(layer.parts))
        added = [up @ small[part * rank : (part + 1) * rank] for part, up in enumerate(ups)]
        out[row] += torch.cat(added).to(out.dtype)
    return out


def _summed_at_once(parts: list[Tensor], summed: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Each of the parts, of any shapes, summed over the ranks in one exchange."""
    if len(parts) == 1:
        return [summed(parts[0])]
    together = summed(torch.cat([part.flatten() for part in parts]))
    pieces = torch.split(together, [part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
