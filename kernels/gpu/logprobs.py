"""Logprobs of the chosen token and of the likeliest ones, of rows that ask for them.

The rule is that of ``penstock.kernels.sampling.logprobs``: by the logits as the model gave them; of
tokens that tie the lowest ids first. One pass finds the highest logit of every group and, by
split, the sum of weights and how many logits are above the chosen one. Then one program a row
takes the likeliest tokens one by one: the group with the highest logit left, and in it the first
token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.early_launch import EARLY, begin_early
from penstock.kernels.gpu.sampler_memory import (
    GROUP,
    SPLIT,
    SamplerSpace,
    groups_of,
    vocab_splits,
)
from penstock.kernels.sampling.logprobs import MOST_LOGPROBS


class LogprobColumns(NamedTuple):
    """Columns by row of the step; nothing is written for rows that do not ask."""

    chosen: Tensor
    """[R] fp32: logprob of the chosen token."""
    rank: Tensor
    """[R] int32: its rank; 1 is the likeliest."""
    top_ids: Tensor
    """[R, ``MOST_LOGPROBS``] int32: the likeliest tokens, as many as the row asks for."""
    top: Tensor
    """[R, ``MOST_LOGPROBS``] fp32: theirs."""


def logprob_columns(rows: int, device: torch.device) -> LogprobColumns:
    """Memory for so many rows, on a device or on the host."""
    return LogprobColumns(
        torch.zeros(rows, dtype=torch.float32, device=device),
        torch.zeros(rows, dtype=torch.int32, device=device),
        torch.zeros(rows, MOST_LOGPROBS, dtype=torch.int32, device=device),
        torch.zeros(rows, MOST_LOGPROBS, dtype=torch.float32, device=device),
    )


@triton.jit
def _survey_kernel(
    logits, rows, wanted, last_token, group_max, split_max, split_mass, above, vocab,
    splits, groups, SPLIT: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    slot = tl.load(rows + row)
    if slot < 0:
        return
    if tl.load(wanted + slot) < 0:
        return
    source = logits + row * vocab
    chosen = tl.load(source + tl.load(last_token + slot)).to(tl.float32)
    ids = split * SPLIT + tl.arange(0, SPLIT)
    z = tl.load(source + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    highest = tl.max(tl.reshape(z, [SPLIT // GROUP, GROUP]), 1)
    group = split * (SPLIT // GROUP) + tl.arange(0, SPLIT // GROUP)
    tl.store(group_max + row * groups + group, highest, mask=group < groups)
    top = tl.max(highest, 0)
    at = row * splits + split
    tl.store(split_max + at, top)
    weight = tl.where(z > float("-inf"), tl.exp(z - top), 0.0)
    tl.store(split_mass + at, tl.sum(weight, 0))
    tl.store(above + at, tl.sum((z > chosen).to(tl.int32), 0))


@triton.jit
def _likeliest_kernel(
    logits, rows, wanted, last_token, group_max, split_max, split_mass, above, chosen_out,
    rank_out, top_ids, top_out, vocab, splits, groups,
    GROUP: tl.constexpr, PADDED: tl.constexpr, PADDED_STRETCHES: tl.constexpr, MOST: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row)
    if slot < 0:
        return
    number = tl.minimum(tl.load(wanted + slot), MOST)
    if number < 0:
        return
    part = tl.arange(0, PADDED_STRETCHES)
    inside = part < splits
    at = row * splits + part
    tops = tl.load(split_max + at, mask=inside, other=float("-inf"))
    masses = tl.load(split_mass + at, mask=inside, other=0.0)
    higher = tl.load(above + at, mask=inside, other=0)
    top = tl.max(tops, 0)
    total = tl.sum(tl.where(masses > 0.0, masses * tl.exp(tops - top), 0.0), 0)
    norm = top + tl.log(total)
    source = logits + row * vocab
    chosen = tl.load(source + tl.load(last_token + slot)).to(tl.float32)
    tl.store(chosen_out + row, chosen - norm)
    tl.store(rank_out + row, tl.sum(higher, 0) + 1)
    group = tl.arange(0, PADDED)
    maxima = tl.load(group_max + row * groups + group, mask=group < groups, other=float("-inf"))
    last = float("inf")
    last_id = -1
    for place in range(number):
        best = tl.max(maxima, 0)
        found = tl.min(tl.where(maxima == best, group, groups - 1), 0)
        ids = found * GROUP + tl.arange(0, GROUP)
        z = tl.load(source + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        left = (z < last) | ((z == last) & (ids > last_id))
        value = tl.max(tl.where(left, z, float("-inf")), 0)
        token = tl.min(tl.where(left & (z == value) & (ids < vocab), ids, vocab - 1), 0)
        tl.store(top_ids + row * MOST + place, token)
        tl.store(top_out + row * MOST + place, value - norm)
        rest = left & ((z < value) | (ids > token))
        after = tl.max(tl.where(rest, z, float("-inf")), 0)
        maxima = tl.where(group == found, after, maxima)
        last = value
        last_id = token


def logprobs(
    logits: Tensor,
    rows: Tensor,
    wanted: Tensor,
    last_token: Tensor,
    space: SamplerSpace,
    out: LogprobColumns,
) -> None:
    """Write ``out`` of the rows whose slots ask for it. Comes after ``commit``.

    logits: [N, V] contiguous, as the model gave them; rows: [N] int32, the slot of each row, -1:
    none. By slot, int32: wanted, how many of the likeliest tokens, 0 … ``MOST_LOGPROBS`` (no more
    than V), -1: no logprobs; last_token, the chosen token. space: its groups and splits are
    overwritten.
    """
    count, vocab = logits.shape
    splits, groups = vocab_splits(vocab), groups_of(vocab)
    _survey_kernel[(count, splits)](
        logits, rows, wanted, last_token, space.group_max, space.split_max, space.split_mass,
        space.bad, vocab, splits, groups, SPLIT, GROUP, EARLY, num_warps=8, launch_pdl=EARLY,
    )  # fmt: skip
    _likeliest_kernel[(count,)](
        logits, rows, wanted, last_token, space.group_max, space.split_max, space.split_mass,
        space.bad, out.chosen, out.rank, out.top_ids, out.top, vocab, splits, groups, GROUP,
        triton.next_power_of_2(groups), triton.next_power_of_2(splits), out.top.shape[1],
        EARLY, num_warps=8, launch_pdl=EARLY,
    )  # fmt: skip
