"""Choosing the next token where each rank of several has the logits of its own tokens.

The rules are those of ``choose``, and so are the bits: of a row that is drawn the noise of a token
is what it is on one device. What a rank has found of a row, its best, is four words; all ranks see
the bests of all and take the highest, of equals the lowest token. Rows with a limit need the floor
first (``shard_floor``). Bans, biases and penalties are of columns. Rows with ``SamplerStages`` need
all columns: of these rows alone the first rank gathers them, and its best is what it has chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.draw_keys import key_words
from penstock.kernels.sampling.adjustment_parts import of_columns, of_rows
from penstock.kernels.sampling.choose import (
    NOT_FINITE,
    NOTHING_LEFT,
    Adjustment,
    Choice,
    bad_rows,
    choose,
)
from penstock.kernels.sampling.gumbel import best
from penstock.kernels.sampling.most_likely import most_likely
from penstock.kernels.sampling.rows import SamplingRows
from penstock.kernels.sampling.shard import Shard
from penstock.kernels.sampling.shard_floor import shard_floor
from penstock.kernels.sampling.stages import SamplerStages


class _Bests(NamedTuple):
    """What a rank has found of R rows."""

    value: Tensor
    """[R] fp32: what the token reaches, noise included."""
    token: Tensor
    """[R] int64."""
    bad: Tensor
    """[R] int8: as ``Choice.bad``, as far as this rank sees."""
    top: Tensor
    """[R] fp32: the highest logit of rows that were adjusted, 0 of others."""

    def packed(self) -> Tensor:
        """[R, 4] int32."""
        words = (self.value.view(torch.int32), self.token, self.bad, self.top.view(torch.int32))
        return torch.stack([word.to(torch.int32) for word in words], 1)


def choose_shards(
    logits: Tensor,
    rows: SamplingRows,
    greedy_below: float,
    adjustments: Sequence[Adjustment],
    shard: Shard,
) -> Choice:
    """``choose`` on all ranks, with the same result. logits: [R, n], this rank's columns;
    adjustments: of whole rows."""
    count = len(rows.temperature)
    staged = [step.rows for step in adjustments if isinstance(step, SamplerStages)]
    whole = np.unique(np.concatenate(staged)) if staged else np.zeros(0, np.int64)
    if not len(whole):
        return _agreed(_own(logits, rows, greedy_below, adjustments, shard), shard)
    packed = torch.empty(count, 4, dtype=torch.int32, device=logits.device)
    rest = np.setdiff1d(np.arange(count), whole)
    for chosen, found in ((whole, _of_whole), (rest, _own)):
        if len(chosen):
            at = torch.from_numpy(chosen).to(logits.device)
            parts = of_rows(adjustments, chosen, count)
            own = logits.index_select(0, at)
            packed[at] = found(own, rows.take(chosen), greedy_below, parts, shard)
    return _agreed(packed, shard)


def _agreed(packed: Tensor, shard: Shard) -> Choice:
    """What all ranks take. packed: [R, 4], from ``_Bests``."""
    value, token, bad, top = shard.gather(packed).unbind(-1)
    numbers, tops = value.contiguous().view(torch.float32), top.contiguous().view(torch.float32)
    highest, tokens = numbers[0], token[0]
    for number, ids in zip(numbers[1:], token[1:], strict=True):
        better = number > highest
        highest, tokens = torch.where(better, number, highest), torch.where(better, ids, tokens)
    nothing = tops.amax(0).isfinite().logical_not_().to(torch.int32) * NOTHING_LEFT
    return Choice(tokens.to(torch.int64), torch.maximum(bad.amax(0), nothing).to(torch.int8))


def _of_whole(
    logits: Tensor,
    rows: SamplingRows,
    greedy_below: float,
    adjustments: Sequence[Adjustment],
    shard: Shard,
) -> Tensor:
    """[R, 4]: rows that the first rank chooses; the others have no best."""
    whole, zeros = shard.columns(logits), torch.zeros(len(logits), device=logits.device)
    if not shard.draws:
        none = zeros.to(torch.int64)
        return _Bests(zeros - torch.inf, none, none, zeros).packed()
    choice = choose(whole, rows, greedy_below, adjustments)
    return _Bests(zeros, choice.tokens, choice.bad, zeros).packed()


def _own(
    logits: Tensor,
    rows: SamplingRows,
    greedy_below: float,
    adjustments: Sequence[Adjustment],
    shard: Shard,
) -> Tensor:
    """[R, 4]: this rank's bests."""
    count, width = logits.shape
    value, column, top = (torch.zeros(count, device=logits.device) for _ in range(3))
    column = column.to(torch.int64)
    bad = bad_rows(logits).to(torch.int8) * NOT_FINITE
    place = np.full(count, -1, np.int64)
    if adjustments:
        changed = np.unique(np.concatenate([step.rows for step in adjustments]))
        place[changed] = np.arange(len(changed))
        at = torch.from_numpy(changed).to(logits.device)
        adjusted = logits.index_select(0, at).float()
        for step in adjustments:
            own = of_columns(step, shard.first, width)
            if len(own.rows):
                own.apply(adjusted, place)
        top[at] = adjusted.amax(-1)
        value[at], column[at] = _best(adjusted, rows.take(changed), greedy_below, shard)
    rest = np.flatnonzero(place < 0)
    if len(rest):
        at = torch.from_numpy(rest).to(logits.device)
        own_rows = logits if len(rest) == count else logits.index_select(0, at)
        value[at], column[at] = _best(own_rows, rows.take(rest), greedy_below, shard)
    return _Bests(value, column + shard.first, bad, top).packed()


def _best(
    logits: Tensor, rows: SamplingRows, greedy_below: float, shard: Shard
) -> tuple[Tensor, Tensor]:
    """What the best of this rank's columns reaches, [R] fp32, and which it is, [R] int64, by logits
    that no step changes any more."""
    greedy = rows.temperature < greedy_below
    limited = ~greedy & rows.limited(shard.vocab)
    value = torch.empty(len(greedy), device=logits.device)
    column = torch.empty(len(greedy), dtype=torch.int64, device=logits.device)
    for index in map(np.flatnonzero, (greedy, limited, ~greedy & ~limited)):
        if len(index):
            at = torch.from_numpy(index).to(logits.device)
            own, asked = logits.index_select(0, at), rows.take(index)
            found = _highest(own) if greedy[index[0]] else _drawn(own, asked, limited[index], shard)
            value[at], column[at] = found
    return value, column


def _highest(logits: Tensor) -> tuple[Tensor, Tensor]:
    column = most_likely(logits)
    return logits.gather(1, column[:, None])[:, 0].float(), column


def _drawn(
    logits: Tensor,
    rows: SamplingRows,
    limited: np.ndarray[tuple[int], np.dtype[np.bool_]],
    shard: Shard,
) -> tuple[Tensor, Tensor]:
    """limited: [R], the same for all of these rows."""
    device, width = logits.device, logits.shape[1]
    scaled = logits.float() / torch.from_numpy(rows.temperature).to(device)[:, None]
    if limited[0]:
        scaled = scaled.masked_fill(scaled < shard_floor(scaled, rows, shard), -torch.inf)
    first = shard.first
    ids = torch.arange(first, first + width, dtype=torch.int32, device=device)[None, :]
    return best(scaled, ids, torch.from_numpy(key_words(rows.keys)).to(device))
