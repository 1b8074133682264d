"""The products of one planned batch of attention: see ``penstock.kernels.attention``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.kernels.exact_attention import ROW_MULTIPLE
from penstock.kernels.kv_cache import read_blocks
from penstock.kernels.online_softmax import SoftmaxSums, softmax_step, weight_of
from penstock.kernels.powers_of_two import LOG2_E

if TYPE_CHECKING:
    from penstock.kernels.attention import AttentionBatch, Tile

_FP32_ELEMENTS = 64 * 1024
"""Decode products over at most this many gathered elements run in fp32."""


def attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """query: [groups * queries, Hq, D]; sinks: [Hq]. Returns [groups * queries, Hq * D]."""
    kv_heads = key_cache.shape[0]
    _, heads, dim = query.shape
    shared = heads // kv_heads
    groups, queries = batch.num_groups, batch.num_queries
    lone = groups == 1 and queries == 1 and len(batch.tiles) == 1 and not batch.exact
    if lone and batch.tiles[0].hidden is None:
        return _attend_alone(query, key_cache, value_cache, batch, scale, sinks)
    dtype = query.dtype
    if queries == 1 and groups * kv_heads * batch.tiles[0].width * dim <= _FP32_ELEMENTS:
        dtype = torch.float32
    scale = scale * LOG2_E if batch.exact else scale
    packed = _packed(query.to(dtype) * scale, kv_heads, batch)
    sums: SoftmaxSums | None = None
    attended: Tensor | None = None
    for tile in batch.tiles:
        active = slice(tile.first * kv_heads, tile.end * kv_heads)
        shape = (active.stop - active.start, tile.width, dim)
        key = read_blocks(key_cache, tile.gather, dtype).view(shape).to(dtype)
        value = read_blocks(value_cache, tile.gather, dtype).view(shape).to(dtype)
        scores = _scores(packed[active], key, tile, kv_heads, batch)
        if len(batch.tiles) == 1 and not batch.exact and sinks is None:
            attended = torch.bmm(torch.softmax(scores, -1).to(dtype), value)
        else:
            sums = softmax_step(sums, packed, scores, value, active, batch.windowed, batch.exact)
    if sums is not None:
        if sinks is not None:
            sink = _sink_rows(sinks, packed, kv_heads, batch)
            sums.row_sum.add_(weight_of(sink.sub_(sums.row_max), batch.exact))
        attended = sums.attended.div_(sums.row_sum)
    if attended is None:
        raise ValueError("an attention batch needs at least one key position")
    if attended.shape[1] > queries * shared:
        attended = attended[:, : queries * shared]
    if queries > 1:
        attended = attended.view(groups, kv_heads, queries, shared, dim).transpose(1, 2)
    return attended.reshape(groups * queries, heads * dim).to(query.dtype)


def _packed(query: Tensor, kv_heads: int, batch: AttentionBatch) -> Tensor:
    """Query rows of one KV head: [groups * Hkv, M, D], M a multiple of ROW_MULTIPLE if exact, of
    [groups * queries, Hq, D]."""
    groups, queries = batch.num_groups, batch.num_queries
    _, heads, dim = query.shape
    rows = queries * heads // kv_heads
    if queries > 1:
        query = query.view(groups, queries, kv_heads, heads // kv_heads, dim).transpose(1, 2)
    packed = query.reshape(groups * kv_heads, rows, dim)
    padding = -rows % ROW_MULTIPLE if batch.exact else 0
    return torch.nn.functional.pad(packed, (0, 0, 0, padding)) if padding else packed


def _scores(
    packed: Tensor, key: Tensor, tile: Tile, kv_heads: int, batch: AttentionBatch
) -> Tensor:
    """[groups of the tile * Hkv, M, width] fp32, -inf where a query does not see a key; multiplied
    by ``LOG2_E`` if exact."""
    scores = torch.bmm(packed, key.transpose(1, 2)).float()
    if batch.softcap:
        cap = batch.softcap * LOG2_E if batch.exact else batch.softcap
        scores = scores.div_(cap).tanh_().mul_(cap)
    if tile.hidden is not None:
        # With padding there is one query in a group: -1 then covers its padding rows too.
        masked = (tile.end - tile.first, kv_heads, batch.num_queries, -1, tile.width)
        scores.view(masked).masked_fill_(tile.hidden, -torch.inf)
    return scores


def _sink_rows(sinks: Tensor, packed: Tensor, kv_heads: int, batch: AttentionBatch) -> Tensor:
    """[groups * Hkv, M, 1] fp32: the sink of the query head of each row of ``packed``; multiplied
    by ``LOG2_E`` if exact."""
    of_heads = sinks.float() * (LOG2_E if batch.exact else 1.0)
    of_heads = of_heads.view(kv_heads, -1).repeat(batch.num_groups, batch.num_queries)
    missing = packed.shape[1] - of_heads.shape[1]
    return torch.nn.functional.pad(of_heads, (0, missing)).unsqueeze(-1)


def _attend_alone(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """One query whose context is one tile: attention over what it sees, so without a mask; fused,
    unless scores are capped or have a sink.

    The query heads that share K and V stand as its queries. (For more rows the fused attention is
    slower than the batched products: 195 µs against 87 for 32 rows.)
    """
    kv_heads, dim = key_cache.shape[0], query.shape[2]
    tile = batch.tiles[0]
    key, value = (
        read_blocks(cache, tile.gather, query.dtype).view(1, kv_heads, tile.width, dim)[
            :, :, tile.seen
        ]
        for cache in (key_cache, value_cache)
    )
    shared = query.view(1, kv_heads, -1, dim)
    if not batch.softcap and sinks is None:
        attended = torch.nn.functional.scaled_dot_product_attention(shared, key, value, scale=scale)
        return attended.reshape(1, -1)
    scores = torch.matmul(shared * scale, key.transpose(2, 3)).float()
    if batch.softcap:
        scores = scores.div_(batch.softcap).tanh_().mul_(batch.softcap)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().view(1, kv_heads, -1, 1)), -1)
    weights = torch.softmax(scores, -1)[..., : key.shape[2]]
    return torch.matmul(weights.to(value.dtype), value).reshape(1, -1)
