"""The tokens that min_p, top_k and top_p keep: all at or above one floor a row.

For z the scaled logits of a row, in this order:

- min_p m (Nguyen et al., "Turning Up the Heat: Min-p Sampling", 2024): probability at least m
  times the highest one, z >= max(z) + ln(m).
- top_k: the k highest of those (Fan et al., "Hierarchical Neural Story Generation", 2018).
- top_p: of those, the smallest set of likeliest tokens whose probability, among those, reaches p
  (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019); at least one token.

Tokens that tie with the last one kept are kept too, so the set does not depend on a sort's order.
Weights are fp32, their sums fp64.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.sampling.gumbel import draw
from penstock.kernels.sampling.row_sums import row_sum
from penstock.kernels.sampling.rows import IntArray, SamplingRows

CANDIDATES = 1024
"""Top-k up to this, and top-p where it reaches so far, are decided without sorting a whole row."""


def draw_limited(scaled: Tensor, rows: SamplingRows, keys: Tensor) -> Tensor:
    """Tokens of rows with min_p, top_k or top_p, [R] int64: decided on the highest ``CANDIDATES``
    logits where they suffice. scaled: [R, V] fp32; keys: [2, R] int32."""
    device, vocab = scaled.device, scaled.shape[1]
    width = min(CANDIDATES, vocab)
    highest, ids = scaled.topk(width, dim=-1)
    top_p = torch.from_numpy(rows.top_p).to(device)[:, None]
    count = np.where((rows.top_k > 0) & (rows.top_k < vocab), rows.top_k, vocab)
    least = least_kept(rows, highest[:, :1])
    weights = weights_of_all(scaled, highest[:, :1], least)
    floor, settled = floor_of(
        highest, weights, torch.from_numpy(count).to(device), top_p, least, vocab
    )
    shown = highest.masked_fill(highest < floor, -torch.inf)
    chosen = draw(shown, ids.to(torch.int32), keys)
    tokens = ids.gather(1, chosen[:, None])[:, 0]
    if width < vocab:
        rest = settled.logical_not().nonzero()[:, 0]
        if len(rest):
            tokens[rest] = _draw_sorted(
                scaled[rest], count[rest.cpu().numpy()], top_p[rest], keys[:, rest],
                None if least is None else least[rest],
            )  # fmt: skip
    return tokens


def least_kept(rows: SamplingRows, highest: Tensor) -> Tensor | None:
    """The floor of min_p alone, [R, 1]; ``None`` where no row has one. highest: [R, 1]."""
    if rows.min_p is None or not rows.min_p.any():
        return None
    with np.errstate(divide="ignore"):
        return highest + torch.from_numpy(np.log(rows.min_p)).to(highest.device)[:, None]


def _draw_sorted(
    scaled: Tensor, count: IntArray, top_p: Tensor, keys: Tensor, least: Tensor | None
) -> Tensor:
    """Rows whose limit lies beyond the candidates: sort them whole."""
    floor = sorted_floor(scaled, count, top_p, least)
    ids = torch.arange(scaled.shape[1], dtype=torch.int32, device=scaled.device)[None, :]
    return draw(scaled.masked_fill(scaled < floor, -torch.inf), ids, keys)


def sorted_floor(scaled: Tensor, count: IntArray, top_p: Tensor, least: Tensor | None) -> Tensor:
    """The floor of rows that are sorted whole, [R, 1]; see ``floor_of``. scaled: [R, V]."""
    ordered = scaled.sort(dim=-1, descending=True).values
    weights = weights_of_all(scaled, ordered[:, :1], least)
    counts = torch.from_numpy(count).to(scaled.device)
    return floor_of(ordered, weights, counts, top_p, least, scaled.shape[1])[0]


def weights_of_all(scaled: Tensor, highest: Tensor, least: Tensor | None) -> Tensor:
    """[R, 1] fp64: sum of what the columns of ``scaled`` [R, n] weigh that min_p keeps. highest:
    [R, 1], of all columns; least: from ``least_kept``."""
    everything = (scaled - highest).exp_()
    if least is not None:
        everything.masked_fill_(scaled < least, 0.0)
    return row_sum(everything, torch.float64)[:, None]


def floor_of(
    ordered: Tensor,
    all_weights: Tensor,
    count: Tensor,
    top_p: Tensor,
    least: Tensor | None,
    vocab: int,
) -> tuple[Tensor, Tensor]:
    """The lowest logit that is kept, and whether ``ordered`` sufficed to find it.

    ordered: [R, W] the W highest of a row of V = ``vocab``, descending; all_weights: [R, 1], from
    ``weights_of_all``; count: [R] int64, top-k or V; top_p: [R, 1]; least: [R, 1], from
    ``least_kept``. Returns [R, 1] and [R] bool.
    """
    width = ordered.shape[1]
    count = count[:, None]
    last = ordered.gather(1, (count - 1).clamp(max=width - 1))
    # All that top-k and min_p keep is among ``ordered``.
    complete = count <= width
    if least is not None:
        last = torch.maximum(last, least)
        complete |= least > ordered[:, -1:]
    weights = (ordered - ordered[:, :1]).exp_()
    weights.masked_fill_(ordered < last, 0.0)
    before = weights.cumsum(-1, dtype=torch.float64) - weights
    kept_weights = before[:, -1:] + weights[:, -1:]
    # Without top-k the weights beyond the candidates count too.
    total = torch.where(complete, kept_weights, all_weights)
    inside = (before < top_p * total).logical_and_(ordered >= last)
    inside[:, 0] = True
    number = inside.sum(-1, keepdim=True)
    floor = ordered.gather(1, number - 1)
    settled = complete | ((count >= vocab) & (number < width))
    return floor, settled[:, 0] | (width == vocab)
