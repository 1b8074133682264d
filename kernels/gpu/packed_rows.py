"""Attention within prompts that stand one behind the other without padding, and their pooling.

Each row attends to all rows of its own prompt, before and behind it. A prompt's queries are cut
into tiles; one program computes one tile of one head over the prompt's keys, with the online
softmax as in FlashAttention-2 (Dao, 2023). Which tiles there are is read from memory: a graph of
these launches serves any prompts. Reference: ``services/worker/encoders/attention.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.attention_arguments import LOG2_E, padded_half
from penstock.kernels.gpu.device_facts import device_capability
from penstock.kernels.gpu.device_functions import LOWEST, dot, softmax_step, within

QUERY_TILE = 64
_LOG2_E = tl.constexpr(LOG2_E)
_KEYS = {(32, 2): 64, (64, 2): 64, (128, 2): 64, (32, 4): 32, (64, 4): 32, (128, 4): 32}
"""Keys in a tile by (padded head size, bytes of a number): so many fit in 99 KB."""
_FEW_KEYS = 16
_WIDE_BYTES = 512
"""Of a head, from which on loads in flight would take too much shared memory."""
_POOLED_COLUMNS = 128
KINDS = ("cls", "last", "mean", "max")


class DistanceBias(NamedTuple):
    """What is added to a score for how far behind its query a key stands."""

    table: Tensor
    """[heads, 2 middle + 1] fp32: of the distances -middle to middle; farther ones have the last
    one's."""
    middle: int


def fp32_precision() -> str:
    """Of products of fp32 numbers on the current device, see ``dot``: tensor cores have TF32 from
    compute capability 8.0 on."""
    capability = device_capability()
    return "ieee" if capability is None or capability < (8, 0) else "tf32x3"


@triton.jit
def _attention_kernel(
    query, key, value, out, tiles, bias, scale, query_stride, key_stride, value_stride, middle,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    tile = tiles + 3 * tl.program_id(1)
    first = tl.load(tile)
    begin = tl.load(tile + 1)
    end = tl.load(tile + 2)
    if first >= end:
        return
    kv_head = head // (HEADS // KV_HEADS)
    column = tl.arange(0, PADDED)
    row = first + tl.arange(0, ROWS)
    inside = within((row < end)[:, None], column[None, :], DIM, PADDED)
    at = row.to(tl.int64)[:, None] * query_stride + head * DIM + column[None, :]
    queries = tl.load(query + at, mask=inside, other=0.0)
    row_max = tl.full([ROWS], LOWEST, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    accumulator = tl.zeros([ROWS, PADDED], tl.float32)
    limit = end
    if WINDOW:
        begin = tl.maximum(begin, first - WINDOW)
        limit = tl.minimum(end, first + ROWS + WINDOW)
    for start in range(begin, limit, KEYS):
        other = start + tl.arange(0, KEYS)
        there = within((other < limit)[:, None], column[None, :], DIM, PADDED)
        place = other.to(tl.int64)[:, None]
        place_of_key = place * key_stride + kv_head * DIM + column[None, :]
        place_of_value = place * value_stride + kv_head * DIM + column[None, :]
        keys = tl.load(key + place_of_key, mask=there, other=0.0)
        values = tl.load(value + place_of_value, mask=there, other=0.0)
        score = dot(queries, tl.trans(keys), PRECISION) * scale
        distance = other[None, :] - row[:, None]
        if BIASED:
            # Rows past the end may be farther than any.
            known = tl.minimum(tl.maximum(distance, -middle), middle)
            score += tl.load(bias + head * (2 * middle + 1) + middle + known) * _LOG2_E
        seen = (other < limit)[None, :]
        if WINDOW:
            seen = seen & (distance <= WINDOW) & (distance >= -WINDOW)
        score = tl.where(seen, score, float("-inf"))
        row_max, row_sum, accumulator = softmax_step(
            score, values, row_max, row_sum, accumulator, 1.0, PRECISION=PRECISION
        )
    result = accumulator / row_sum[:, None]
    at = (row.to(tl.int64)[:, None] * HEADS + head) * DIM + column[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


def tiles_for(rows: int, prompts: int) -> int:
    """How many tiles ``rows`` rows of at most so many prompts have at most."""
    return min(prompts, rows) + rows // QUERY_TILE


def packed_tiles(
    spans: Sequence[tuple[int, int]],
) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """[T, 3], as ``packed_attention`` takes them. spans: first row and end of each prompt."""
    found = [(first, begin, end) for begin, end in spans for first in range(begin, end, QUERY_TILE)]
    return np.array(found, np.int32).reshape(-1, 3)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tiles: Tensor,
    out: Tensor,
    scale: float,
    window: int = 0,
    bias: DistanceBias | None = None,
) -> None:
    """query: [N, Hq, D]; key, value: [N, Hkv, D], in each of which a row's heads are contiguous;
    out: [N, Hq, D], contiguous; tiles: [T, 3] int32: first row (of at most ``QUERY_TILE``), first
    row of its prompt and end of its prompt; three zeros: no tile. window: farther positions are not
    seen; 0: all are. bias: divided by no scale. Rows of no tile are not written.
    """
    _, heads, dim = query.shape
    padded = 2 * padded_half(dim)
    keys = _KEYS.get((padded, query.element_size()), _FEW_KEYS)
    table, middle = (out, 0) if bias is None else bias
    _attention_kernel[(heads, len(tiles))](
        query, key, value, out, tiles, table, scale * LOG2_E, query.stride(0), key.stride(0),
        value.stride(0), middle, heads, key.shape[1], dim, padded, QUERY_TILE, keys, window,
        bias is not None, fp32_precision(), num_warps=4,
        num_stages=1 if padded * query.element_size() >= _WIDE_BYTES else 2,
    )  # fmt: skip


@triton.jit
def _pool_kernel(
    states, spans, out, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    prompt = tl.program_id(0)
    begin = tl.load(spans + 2 * prompt)
    end = tl.load(spans + 2 * prompt + 1)
    if begin >= end:
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    row = begin
    if KIND == 1:
        row = end - 1
    place = states + row.to(tl.int64) * WIDTH + column
    found = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if KIND >= 2:
        for _ in range(begin + 1, end):
            place += WIDTH
            state = tl.load(place, mask=inside, other=0.0).to(tl.float32)
            if KIND == 2:
                found += state
            else:
                found = tl.maximum(found, state)
    if KIND == 2:
        found = found / (end - begin)
    tl.store(out + prompt * WIDTH + column, found, mask=inside)


def pool_rows(states: Tensor, spans: Tensor, kind: str, out: Tensor) -> None:
    """states: [N, width], contiguous; spans: [P, 2] int32: first row and end of each prompt; two
    zeros: no prompt, of which nothing is written; kind: one of ``KINDS``; out: [P, width] fp32."""
    width = states.shape[1]
    _pool_kernel[(len(spans), triton.cdiv(width, _POOLED_COLUMNS))](
        states, spans, out, width, _POOLED_COLUMNS, KINDS.index(kind), num_warps=1
    )
