"""The steps of the sampler in order, each for the rows that ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.draw_keys import key_words
from penstock.kernels.sampling.gumbel import draw
from penstock.kernels.sampling.keep_floor import draw_limited
from penstock.kernels.sampling.most_likely import most_likely
from penstock.kernels.sampling.rows import IntArray, SamplingRows

NOTHING_LEFT = 1
"""A row has no next token: its logits were finite until adjustments banned every token or made one
infinite. The request that asked for them is to blame."""
NOT_FINITE = 2
"""A row has no next token: its logits are not finite as the model made them."""


class Adjustment(Protocol):
    """A step that changes logits before the temperature."""

    @property
    def rows(self) -> IntArray:
        """The rows of the batch that it changes, ascending, each once."""

    def apply(self, logits: Tensor, place: IntArray) -> None:
        """Change rows in place.

        logits: [A, V] fp32, the rows that any adjustment changes; place: [R], where in ``logits``
        a row of the batch is.
        """


class Choice(NamedTuple):
    tokens: Tensor
    """[R] int64, always in 0 … V - 1."""
    bad: Tensor
    """[R] int8: why a row has no next token, ``NOTHING_LEFT`` or ``NOT_FINITE``; 0: it has one."""


def bad_rows(logits: Tensor) -> Tensor:
    """[R] bool: rows of ``logits`` [R, V] that hold a NaN or an infinity.

    One reading pass: a sum is finite exactly if its terms are (finite logits that overflow fp32
    when summed are no better).
    """
    return logits.sum(-1, dtype=torch.float32).isfinite().logical_not_()


def choose(
    logits: Tensor,
    rows: SamplingRows,
    greedy_below: float,
    adjustments: Sequence[Adjustment] = (),
) -> Choice:
    """The chosen token of every row, and the rows that have none.

    logits: [R, V] fp32, bf16 or fp16 (not changed). A row's result depends on that row alone.
    """
    bad = bad_rows(logits).to(torch.int8) * NOT_FINITE
    if not adjustments:
        return Choice(_chosen(logits, rows, greedy_below), bad)
    count = len(rows.temperature)
    changed = np.unique(np.concatenate([step.rows for step in adjustments]))
    place = np.full(count, -1, np.int64)
    place[changed] = np.arange(len(changed))
    where = torch.from_numpy(changed).to(logits.device)
    adjusted = logits.index_select(0, where).float()
    for step in adjustments:
        step.apply(adjusted, place)
    nothing = adjusted.max(-1).values.isfinite().logical_not_().to(torch.int8) * NOTHING_LEFT
    bad[where] = torch.maximum(bad[where], nothing)
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    tokens[where] = _chosen(adjusted, rows.take(changed), greedy_below)
    rest = np.flatnonzero(place < 0)
    if len(rest):
        at = torch.from_numpy(rest).to(logits.device)
        tokens[at] = _chosen(logits.index_select(0, at), rows.take(rest), greedy_below)
    return Choice(tokens, bad)


def sample(logits: Tensor, rows: SamplingRows, greedy_below: float) -> Tensor:
    """The tokens of ``choose`` alone, without adjustments, also for rows that are not finite."""
    return _chosen(logits, rows, greedy_below)


def _chosen(logits: Tensor, rows: SamplingRows, greedy_below: float) -> Tensor:
    """Tokens by logits that no step changes any more."""
    greedy = rows.temperature < greedy_below
    if greedy.all():
        return most_likely(logits)
    limited = ~greedy & rows.limited(logits.shape[1])
    tokens = torch.empty(len(greedy), dtype=torch.int64, device=logits.device)
    for mask, way in (
        (greedy, _greedy),
        (limited, _draw_limited),
        (~greedy & ~limited, _draw_plain),
    ):
        index = np.flatnonzero(mask)
        if len(index) == len(greedy):
            return way(logits, rows)
        if len(index):
            where = torch.from_numpy(index).to(logits.device)
            tokens[where] = way(logits.index_select(0, where), rows.take(index))
    return tokens


def _greedy(logits: Tensor, rows: SamplingRows) -> Tensor:
    return most_likely(logits)


def _draw_plain(logits: Tensor, rows: SamplingRows) -> Tensor:
    vocab = logits.shape[1]
    ids = torch.arange(vocab, dtype=torch.int32, device=logits.device)[None, :]
    return draw(_scaled(logits, rows), ids, _device_keys(rows, logits.device))


def _draw_limited(logits: Tensor, rows: SamplingRows) -> Tensor:
    return draw_limited(_scaled(logits, rows), rows, _device_keys(rows, logits.device))


def _scaled(logits: Tensor, rows: SamplingRows) -> Tensor:
    """fp32 logits over the temperatures."""
    temperature = torch.from_numpy(rows.temperature).to(logits.device)
    return logits.float() / temperature[:, None]


def _device_keys(rows: SamplingRows, device: torch.device) -> Tensor:
    """[2, R] int32."""
    return torch.from_numpy(key_words(rows.keys)).to(device)
