"""Attention of each row of a step to its own prompt, by torch's operations.

Prompts are taken together in batches. On a CPU those of one length are a batch: nothing is padded,
and nothing masked that need not be. (64 prompts of 4 to 80 tokens with 12 heads of 32 take 13 ms of
one core so, and 16 to 29 ms in padded batches of 1 to 10 lengths. The matrix products of the layer
take ten times as long.) On a GPU a launch costs more than padding: a batch is what has about the
same length, within a factor of two, so a step has ten at most. Where the GPU has our kernels, all
prompts are one launch (``gpu_steps.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from penstock.services.worker.encoders.packed_rows import PackedRows
from penstock.services.worker.encoders.specification import LayerKind

MOST_BIASED = 1 << 26
"""Scores of a padded batch that something is added to, at most: they are in memory at once."""
FAR = 128
"""From this distance on all share a bucket."""
BANDED_WINDOWS = 4
"""A prompt that is longer than so many windows attends in pieces of two windows; a mask over all of
it would grow with the square of its length."""


class Batch(NamedTuple):
    """Prompts that stand behind one another, and attend together."""

    begin: int
    """Their first row."""
    end: int
    size: int
    """Prompts."""
    length: int
    """Tokens of the longest."""
    lengths: Tensor | None = None
    """[size] of each; ``None``: all have the same, and nothing is padded."""
    taken: Tensor | None = None
    """[size * length]: the row that stands at each place; any row where there is none."""
    places: Tensor | None = None
    """[end - begin]: the place of each row."""

    def padded(self, x: Tensor) -> Tensor:
        """[size, heads, length, D] of [N, heads, D]."""
        rows = x[self.begin : self.end] if self.taken is None else x.index_select(0, self.taken)
        return rows.reshape(self.size, self.length, *x.shape[1:]).transpose(1, 2)

    def packed(self, x: Tensor) -> Tensor:
        """[end - begin, heads, D] of [size, heads, length, D]."""
        rows = x.transpose(1, 2).flatten(0, 1)
        return rows if self.places is None else rows.index_select(0, self.places)


class RelativeBias:
    """What is added to scores by the distance of key and query, in T5's buckets.

    The bias of a shorter prompt is a corner of that of a longer one, so that of the longest prompt
    so far is all that is kept: [heads, longest, longest].
    """

    def __init__(self, table: Tensor) -> None:
        """table: [buckets, heads]."""
        self._table = table
        self._longest: Tensor | None = None

    def __call__(self, length: int) -> Tensor:
        """[1, heads, length, length]."""
        if self._longest is None or self._longest.shape[-1] < length:
            self._longest = relative_bias(self._table, length).contiguous()
        return self._longest[..., :length, :length]

    def by_distance(self) -> Tensor:
        """[heads, 2 FAR + 1] fp32, of the distances -FAR to FAR; farther ones have the same."""
        square = relative_bias(self._table, FAR + 1)[0].float()
        return torch.cat((square[:, -1], square[:, 0, 1:]), -1).contiguous()


class RowAttention(Protocol):
    """The attention of a step's rows, each to its own prompt."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, kind: LayerKind, scale: float | None = None
    ) -> Tensor:
        """query: [N, heads, D]; key, value: [N, KV heads, D], with as many rows as the step has, or
        more, which are nobody's. scale: of scores, by default 1 / sqrt(D). Returns
        [N, heads, D]."""


def attention_of(rows: PackedRows, bias: RelativeBias | None = None) -> RowAttention:
    """bias: what is added to scores, of all layers."""
    if rows.tiles is None:
        return PromptAttention(rows, bias)
    from penstock.services.worker.encoders.tile_attention import TileAttention

    return TileAttention(rows.tiles, bias)


class PromptAttention:
    """The attention of one step's layers. Masks are made once for all layers that share one."""

    def __init__(self, rows: PackedRows, bias: RelativeBias | None = None) -> None:
        """bias: what is added to scores, of all layers."""
        self._bias = bias
        self._batches: list[Batch] = []
        self._masks: dict[tuple[int, int], Tensor | None] = {}
        self._rows = rows

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, kind: LayerKind, scale: float | None = None
    ) -> Tensor:
        """See ``RowAttention``."""
        if not self._batches:
            self._batches = list(_batches(self._rows, self._bias, query.shape[1]))
        out = torch.empty_like(query)
        for number, batch in enumerate(self._batches):
            q, k, v = (batch.padded(one) for one in (query, key, value))
            if kind.window and batch.length > BANDED_WINDOWS * kind.window:
                attended = banded(q, k, v, kind.window, batch.lengths, scale)
            else:
                attended = scaled_dot_product_attention(
                    q, k, v, attn_mask=self._added(number, batch, kind.window), scale=scale,
                    enable_gqa=key.shape[1] != query.shape[1],
                )  # fmt: skip
            out[batch.begin : batch.end] = batch.packed(attended)
        out[self._batches[-1].end :] = 0.0
        return out

    def _added(self, number: int, batch: Batch, window: int) -> Tensor | None:
        """What is added to a batch's scores, or which keys are attended to."""
        allowed = self._mask(number, batch, window)
        if self._bias is None:
            return allowed
        bias = self._bias(batch.length)
        return bias if allowed is None else bias.masked_fill(~allowed, -math.inf)

    def _mask(self, number: int, batch: Batch, window: int) -> Tensor | None:
        """bool, of scores [size, heads, length, length]; ``None``: all are attended to."""
        if batch.length <= window + 1:
            window = 0
        if (number, window) not in self._masks:
            found: Tensor | None = None
            at = torch.arange(batch.length, device=self._rows.tokens.device)
            if window:
                found = (at[:, None] - at).abs() <= window
            if batch.lengths is not None:
                present = (at < batch.lengths[:, None])[:, None, None]
                found = present if found is None else found & present
            self._masks[number, window] = found
        return self._masks[number, window]


def _batches(rows: PackedRows, bias: RelativeBias | None, heads: int) -> Iterator[Batch]:
    device, begin = rows.tokens.device, 0
    alike = int if device.type == "cpu" else lambda length: (length - 1).bit_length()
    for _, same in groupby(rows.lengths, key=alike):
        lengths = list(same)
        most = len(lengths)
        if bias is not None and lengths[0] != lengths[-1]:
            most = max(1, MOST_BIASED // (heads * lengths[-1] ** 2))
        for first in range(0, len(lengths), most):
            batch = batch_of(begin, lengths[first : first + most], device)
            yield batch
            begin = batch.end


def batch_of(begin: int, lengths: list[int], device: torch.device) -> Batch:
    """The batch of prompts of these lengths, ascending, from row ``begin`` on."""
    size, longest = len(lengths), lengths[-1]
    end = begin + sum(lengths)
    if lengths[0] == longest:
        return Batch(begin, end, size, longest)
    each = np.array(lengths, np.int64)
    at = np.arange(longest)
    present = at < each[:, None]
    first = begin + np.cumsum(each) - each
    taken = np.where(present, first[:, None] + at, begin).ravel()
    places = np.flatnonzero(present)
    on_device = (torch.from_numpy(one).to(device) for one in (each, taken, places))
    return Batch(begin, end, size, longest, *on_device)


def banded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    lengths: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention to ``window`` positions on either side, in pieces of ``2 * window`` queries, each
    of which sees twice as many keys: time and memory grow with the length, not with its square.

    query: [n, heads, L, D]; key, value: [n, KV heads, L, D]. lengths: [n] positions that there are
    of each; ``None``: all. Returns [n, heads, L, D]; rows that are not there mean nothing.
    """
    size, heads, length, dim = query.shape
    piece = 2 * window
    pieces = -(-length // piece)
    behind = pieces * piece - length
    q = pad(query, (0, 0, 0, behind)).view(size, heads, pieces, piece, dim)
    q = q.transpose(1, 2).flatten(0, 1)
    k, v = (
        pad(one, (0, 0, window, behind + window))
        .unfold(2, 2 * piece, piece)  # [n, KV heads, pieces, D, keys]
        .permute(0, 2, 1, 4, 3)
        .flatten(0, 1)
        for one in (key, value)
    )
    at = torch.arange(2 * piece, device=query.device)
    distance = at - window - at[:piece, None]
    first = piece * torch.arange(pieces, device=query.device)
    position = first[:, None] + at - window  # [pieces, keys]
    last = torch.full((1,), length, device=query.device) if lengths is None else lengths
    present = (position >= 0) & (position < last[:, None, None])  # [1 or n, pieces, keys]
    allowed = (distance.abs() <= window) & present[:, :, None]
    allowed = allowed.expand(size, -1, -1, -1).flatten(0, 1).unsqueeze(1)
    found = scaled_dot_product_attention(
        q, k, v, attn_mask=allowed, scale=scale, enable_gqa=key.shape[1] != heads
    )
    found = found.view(size, pieces, heads, piece, dim).transpose(1, 2)
    return found.reshape(size, heads, pieces * piece, dim)[:, :, :length]


def relative_bias(table: Tensor, length: int, most: int = FAR) -> Tensor:
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
