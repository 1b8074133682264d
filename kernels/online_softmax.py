"""Softmax over keys that come tile by tile, and the sums of values weighted by it.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018). Of what came
before, rows keep a maximum, the sum of weights and the weighted sum of values; a higher maximum
scales both sums down.

In fp32 on the CPU a weight is a power of two, of scores that were multiplied by ``LOG2_E``: torch
computes ``exp2`` two to three times as fast as ``exp`` there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.powers_of_two import LN_2, exp2_in_place

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
    powers: bool,
) -> SoftmaxSums:
    """Add the keys of a tile, which the rows ``active`` of ``packed`` may see; in place, but for
    the first. powers: see ``add_tile``."""
    if sums is None:
        if len(scores) == len(packed):
            new_max = scores.amax(-1, keepdim=True)
            if windowed:
                new_max.clamp_(min=LOWEST)
            weights = _weights(scores.sub_(new_max), powers)
            attended = torch.bmm(weights.to(value.dtype), value).float()
            return SoftmaxSums(new_max, weights.sum(-1, keepdim=True), attended)
        row_max = packed.new_full((*packed.shape[:2], 1), LOWEST, dtype=torch.float32)
        attended = torch.zeros_like(packed, dtype=torch.float32)
        sums = SoftmaxSums(row_max, torch.zeros_like(row_max), attended)
    add_tile(SoftmaxSums(*(part[active] for part in sums)), scores, value, powers)
    return sums


def add_tile(sums: SoftmaxSums, scores: Tensor, value: Tensor, powers: bool) -> None:
    """Add the keys of a tile to the sums of rows, in place; ``scores`` is overwritten.

    scores: [B, M, width] fp32, -inf where a row does not see a key; value: [B, width, D]; powers:
    whether the scores, hence the maxima, are multiplied by ``LOG2_E``, and M * width is a multiple
    of 32.
    """
    new_max = torch.maximum(sums.row_max, scores.amax(-1, keepdim=True))
    decay = weight_of(sums.row_max - new_max, powers)
    sums.row_max.copy_(new_max)
    weights = _weights(scores.sub_(new_max), powers)
    sums.row_sum.mul_(decay).add_(weights.sum(-1, keepdim=True))
    attended = sums.attended.mul_(decay)
    if value.dtype == attended.dtype:
        attended.baddbmm_(weights, value)
    else:
        attended.add_(torch.bmm(weights.to(value.dtype), value))


def weight_of(difference: Tensor, powers: bool) -> Tensor:
    """The weights of a few scores less their rows' maxima, in place."""
    return difference.mul_(LN_2).exp_() if powers else difference.exp_()


def _weights(differences: Tensor, powers: bool) -> Tensor:
    """The weights of the scores of a tile less their rows' maxima, in place."""
    return exp2_in_place(differences) if powers else differences.exp_()
