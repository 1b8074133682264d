"""Logprobs of the chosen token and of the likeliest ones, by the logits as the model gave them.

log softmax(z)[t] = z[t] - log(sum of exp(z)). A token's rank is 1 plus the number of tokens with a
higher logit. Of tokens that tie, those of the lowest ids are listed, in the order of ids.
Neither bans nor penalties nor the temperature matter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.sampling.row_sums import row_logsumexp

MOST_LOGPROBS = 20
_ELEMENTS = 256 * 1024
"""Logits whose weights are made at once: the temporaries stay in a core's cache."""


class Logprobs(NamedTuple):
    """Logprobs of each of R rows."""

    chosen: Tensor
    """[R] fp32: of the chosen token."""
    rank: Tensor
    """[R] int64: of the chosen token; 1 is the likeliest."""
    top_ids: Tensor
    """[R, N] int64: the likeliest tokens first."""
    top: Tensor
    """[R, N] fp32: theirs."""


def logprobs(logits: Tensor, tokens: Tensor, most: int) -> Logprobs:
    """logits: [R, V] fp32, bf16 or fp16, the rows that ask; tokens: [R] int64, the chosen ones;
    most: 0 … ``MOST_LOGPROBS``, or V if that is less, the likeliest tokens wanted of each row."""
    own = logits.gather(1, tokens[:, None])
    at_once = max(1, _ELEMENTS // logits.shape[1])
    total, rank = [], []
    for first in range(0, len(logits), at_once):
        part = slice(first, first + at_once)
        total.append(row_logsumexp(logits[part].float()))
        rank.append((logits[part] > own[part]).sum(-1))
    norm = torch.cat(total) if total else own.float()[:, 0]
    ids, values = _highest(logits, most)
    return Logprobs(
        own.float()[:, 0] - norm,
        (torch.cat(rank) if rank else tokens) + 1,
        ids,
        values - norm[:, None],
    )


def _highest(logits: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """ids [R, N] int64 and logits [R, N] fp32 of the highest, of ties the lowest ids."""
    count, device = len(logits), logits.device
    if not most or not count:
        return (
            torch.zeros(count, most, dtype=torch.int64, device=device),
            torch.zeros(count, most, device=device),
        )
    last = logits.topk(most, dim=-1).values[:, -1:]
    # A NaN, which ``topk`` takes for the highest, is not below anything.
    row, token = (logits < last).logical_not_().nonzero().unbind(1)
    value = logits[row, token].float()
    order = value.argsort(stable=True, descending=True)
    order = order[row[order].argsort(stable=True)]
    token, value = token[order], value[order]
    number = torch.bincount(row, minlength=count)
    first = number.cumsum(0) - number
    at = first[:, None] + torch.arange(most, device=device)
    return token[at], value[at]
