"""The prompts of a step, one behind the other without padding, and attention among their rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from penstock.services.worker.encoders.specification import LayerKind


class Prompt(NamedTuple):
    """One prompt of a step."""

    tokens: np.ndarray[tuple[int, ...], np.dtype[np.int32]]
    second: int = 0
    """Where its second segment begins; 0: it has one."""


class Group(NamedTuple):
    """Prompts of one length that stand behind one another."""

    begin: int
    """Their first row."""
    size: int
    """Prompts."""
    length: int

    @property
    def end(self) -> int:
        return self.begin + self.size * self.length


class PackedRows(NamedTuple):
    """N rows: the tokens of all prompts, shorter ones first."""

    tokens: Tensor
    """[N] int64."""
    positions: Tensor
    """[N] int64, from 0 on in each prompt."""
    segments: Tensor
    """[N] int64: 0 or 1."""
    groups: list[Group]
    order: list[int]
    """The place of each packed prompt among those that were given."""


def pack(prompts: Sequence[Prompt], device: torch.device) -> PackedRows:
    """prompts: one or more, none of them empty."""
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number].tokens))
    lengths = [len(prompts[number].tokens) for number in order]
    groups, begin = [], 0
    for length, same in groupby(lengths):
        groups.append(Group(begin, len(list(same)), length))
        begin = groups[-1].end
    ids = np.concatenate([prompts[number].tokens for number in order]).astype(np.int64)
    at = np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])
    second = np.zeros(len(ids), np.int64)
    row = 0
    for number, length in zip(order, lengths, strict=True):
        if begins := prompts[number].second:
            second[row + begins : row + length] = 1
        row += length
    tokens, positions, segments = (torch.from_numpy(one).to(device) for one in (ids, at, second))
    return PackedRows(tokens, positions, segments, groups, order)


Bias = Callable[[int], Tensor]
"""What is added to scores, [1, heads, length, length], of prompts of a length."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    groups: Sequence[Group],
    kind: LayerKind,
    bias: Bias | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of each row to its own prompt. query: [N, heads, D]; key, value: [N, KV heads, D].
    scale: of scores, by default 1 / sqrt(D). Returns [N, heads, D].

    Prompts of one length are one batch: nothing is padded, and nothing masked that need not be.
    """
    out = torch.empty_like(query)
    shared = key.shape[1] != query.shape[1]
    for group in groups:
        rows = slice(group.begin, group.end)
        q, k, v = (
            one[rows].reshape(group.size, group.length, *one.shape[1:]).transpose(1, 2)
            for one in (query, key, value)
        )
        mask = None if bias is None else bias(group.length)
        if kind.window and group.length > kind.window + 1:
            at = torch.arange(group.length, device=query.device)
            mask = (at[:, None] - at[None, :]).abs() <= kind.window
        attended = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=shared
        )
        out[rows] = attended.transpose(1, 2).reshape(-1, *query.shape[1:])
    return out


def relative_bias(table: Tensor, length: int, most: int = 128) -> Tensor:
    """[1, heads, length, length] of T5's buckets of distances, of which half are exact and the rest
    grow logarithmically up to ``most`` (Raffel et al., 2020). table: [buckets, heads]."""
    half = table.shape[0] // 2
    exact = half // 2
    at = torch.arange(length, device=table.device)
    distance = at[None, :] - at[:, None]  # of the key from the query
    size = distance.abs()
    far = torch.log(size.clamp(min=1).float() / exact) / math.log(most / exact) * (half - exact)
    bucket = torch.where(size < exact, size, (exact + far.long()).clamp(max=half - 1))
    bucket = bucket + (distance > 0) * half
    return table[bucket].permute(2, 0, 1).unsqueeze(0)
