"""The floor of min_p, top_k and top_p where each rank of several has its own columns.

The rules are those of ``keep_floor``. Each rank sends the highest of its logits: for top_k as many
as the most that a row keeps, for top_p ``CANDIDATES``, and then what all of its logits weigh. The
highest of all of them are the highest of the row. What the first rank finds with them is the floor
of all. Rows whose limit lies beyond are gathered, those alone, and the first rank sorts them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.sampling.keep_floor import (
    CANDIDATES,
    floor_of,
    least_kept,
    sorted_floor,
    weights_of_all,
)
from penstock.kernels.sampling.rows import IntArray, SamplingRows
from penstock.kernels.sampling.shard import Shard


def shard_floor(scaled: Tensor, rows: SamplingRows, shard: Shard) -> Tensor:
    """[R, 1] fp32: the lowest scaled logit that is kept, the same on all ranks. scaled: [R, n]
    fp32, this rank's columns."""
    device, vocab = scaled.device, shard.vocab
    count = np.where((rows.top_k > 0) & (rows.top_k < vocab), rows.top_k, vocab)
    ordered = _highest_of_all(scaled, _needed(rows, count), shard)
    least = least_kept(rows, ordered[:, :1])
    top_p = torch.from_numpy(rows.top_p).to(device)[:, None]
    counts = torch.from_numpy(count).to(device)
    floor = _without_top_p(ordered, counts, least, vocab)
    settled = torch.from_numpy((count <= ordered.shape[1]) | (count == vocab)).to(device)
    if (rows.top_p < 1.0).any():
        own = weights_of_all(scaled, ordered[:, :1], least)
        weights = torch.zeros_like(own)
        for part in shard.gather(own):
            weights += part
        with_top_p, enough = floor_of(ordered, weights, counts, top_p, least, vocab)
        has_top_p = top_p < 1.0
        floor = torch.where(has_top_p, with_top_p, floor)
        settled = torch.where(has_top_p[:, 0], enough, settled)
    told = shard.gather(torch.cat((floor, settled[:, None].to(floor.dtype)), 1))[0]
    floor = told[:, :1]
    rest = (told[:, 1] == 0.0).nonzero()[:, 0]
    if len(rest):
        least = None if least is None else least[rest]
        at = rest.cpu().numpy()
        floor[rest] = _gathered(scaled[rest], count[at], top_p[rest], least, shard)
    return floor


def _needed(rows: SamplingRows, count: IntArray) -> int:
    """How many of the highest logits of each rank are looked at."""
    by_count = np.where((count <= CANDIDATES) & (rows.top_k > 0), count, 1)
    return int(np.where(rows.top_p < 1.0, CANDIDATES, by_count).max())


def _highest_of_all(scaled: Tensor, width: int, shard: Shard) -> Tensor:
    """[R, min(width, V)]: the highest logits of all ranks, descending."""
    width = min(width, shard.vocab)
    there = min(width, scaled.shape[1])
    own = scaled.topk(there, dim=-1).values
    own = torch.nn.functional.pad(own, (0, width - there), value=-torch.inf)
    parts = shard.gather(own).transpose(0, 1).reshape(len(scaled), -1)
    return parts.topk(width, dim=-1).values


def _without_top_p(ordered: Tensor, counts: Tensor, least: Tensor | None, vocab: int) -> Tensor:
    """[R, 1]: the floor of top_k and min_p; of a top_k beyond what is ordered it means nothing.
    counts: [R], top-k or V."""
    at = (counts - 1).clamp(max=ordered.shape[1] - 1)[:, None]
    floor = ordered.gather(1, at).masked_fill((counts >= vocab)[:, None], -torch.inf)
    return floor if least is None else torch.maximum(floor, least)


def _gathered(
    scaled: Tensor, count: IntArray, top_p: Tensor, least: Tensor | None, shard: Shard
) -> Tensor:
    """[R, 1]: of rows whose limit lies beyond the highest logits that all know."""
    whole = shard.columns(scaled)
    floor = scaled.new_zeros(len(scaled), 1)
    if shard.draws:
        floor = sorted_floor(whole, count, top_p, least)
    return shard.gather(floor)[0]
