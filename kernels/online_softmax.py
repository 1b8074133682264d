"""Softmax over keys that come tile by tile, and the sums of values weighted by it.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018). Of what came
before, rows keep a maximum, the sum of weights and the weighted sum of values; a higher maximum
scales both sums down.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LOWEST = -1e30
"""The maximum of no scores; finite, so that exp(-inf - LOWEST) is 0."""


class SoftmaxSums(NamedTuple):
    """What the online softmax keeps of the keys so far, fp32."""

    row_max: Tensor
    """[groups * Hkv, M, 1]."""
    row_sum: Tensor
    attended: Tensor
    """[groups * Hkv, M, D]: values, summed by their weights."""


def softmax_step(
    sums: SoftmaxSums | None,
    packed: Tensor,
    scores: Tensor,
    value: Tensor,
    active: slice,
    windowed: bool,
) -> SoftmaxSums:
    """Add the keys of a tile, which the rows ``active`` of ``packed`` may see; in place, but for
    the first."""
    if sums is None:
        if len(scores) == len(packed):
            new_max = scores.amax(-1, keepdim=True)
            if windowed:
                new_max.clamp_(min=LOWEST)
            weights = scores.sub_(new_max).exp_()
            attended = torch.bmm(weights.to(value.dtype), value).float()
            return SoftmaxSums(new_max, weights.sum(-1, keepdim=True), attended)
        row_max = packed.new_full((*packed.shape[:2], 1), LOWEST, dtype=torch.float32)
        attended = torch.zeros_like(packed, dtype=torch.float32)
        sums = SoftmaxSums(row_max, torch.zeros_like(row_max), attended)
    add_tile(SoftmaxSums(*(part[active] for part in sums)), scores, value)
    return sums


def add_tile(sums: SoftmaxSums, scores: Tensor, value: Tensor) -> None:
    """Add the keys of a tile to the sums of rows, in place; ``scores`` is overwritten.

    scores: [B, M, width] fp32, -inf where a row does not see a key; value: [B, width, D].
    """
    new_max = torch.maximum(sums.row_max, scores.amax(-1, keepdim=True))
    decay = (sums.row_max - new_max).exp_()
    sums.row_max.copy_(new_max)
    weights = scores.sub_(new_max).exp_()
    sums.row_sum.mul_(decay).add_(weights.sum(-1, keepdim=True))
    attended = sums.attended.mul_(decay)
    if value.dtype == attended.dtype:
        attended.baddbmm_(weights, value)
    else:
        attended.add_(torch.bmm(weights.to(value.dtype), value))
