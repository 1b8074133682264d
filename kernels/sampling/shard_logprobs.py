"""Logprobs where each rank of several has the logits of its own tokens.

The rule is that of ``penstock.kernels.sampling.logprobs``. In two exchanges: each rank's highest
logit, its sum of weights and the chosen token's logit; then how many of its logits are above that
one, and its likeliest tokens. Sums go by rank. On a GPU nothing waits for the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.sampling.logprobs import Logprobs
from penstock.kernels.sampling.shard import Shard

_LOW = 0xFFFFFFFF
_LOWEST = -(1 << 63)


def shard_logprobs(logits: Tensor, tokens: Tensor, most: int, shard: Shard) -> Logprobs:
    """``logprobs`` of rows of which this rank has ``logits`` [R, n]; tokens: [R] int64, of the
    whole vocabulary, as those that are returned."""
    z = logits.float() + 0.0  # -0 is 0
    chosen, norm = _sums(z, tokens, shard)
    above = (z > chosen[:, None]).sum(-1, keepdim=True)
    found = shard.gather(torch.cat((above, _highest(z, most, shard.first)), 1))
    rank = found[:, :, 0].sum(0) + 1
    keys = found[:, :, 1:].transpose(0, 1).reshape(len(z), -1).topk(most, dim=-1).values
    values = _numbers(keys)
    return Logprobs(chosen - norm, rank, _LOW - (keys & _LOW), values - norm[:, None])


def _sums(z: Tensor, tokens: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
    """[R] fp32 each: the chosen tokens' logits and the log of the sum of all weights."""
    column = tokens - shard.first
    others = (column < 0) | (column >= z.shape[1])
    own = z.gather(1, column.masked_fill(others, 0)[:, None])[:, 0].masked_fill(others, -torch.inf)
    top = z.amax(-1)
    mass = (z - top[:, None]).exp_().sum(-1)
    parts = shard.gather(torch.stack((own, top, mass)))
    highest = parts[:, 1].amax(0)
    total = torch.zeros_like(highest)
    for _, part_top, part_mass in parts:
        total += part_mass * (part_top - highest).exp_()
    return parts[:, 0].amax(0), highest + total.log_()


def _highest(z: Tensor, most: int, first: int) -> Tensor:
    """[R, most] int64: keys of the highest logits, in the order of the logits and, of equals, of
    falling tokens. first: the token of the first column."""
    ids = torch.arange(first, first + z.shape[1], device=z.device)
    bits = z.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.to(torch.int64) << 32) + (_LOW - ids)
    there = min(most, z.shape[1])
    highest = keys.topk(there, dim=-1).values
    return torch.nn.functional.pad(highest, (0, most - there), value=_LOWEST)


def _numbers(keys: Tensor) -> Tensor:
    """The logits that keys were made of."""
    ordered = (keys >> 32).to(torch.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)
