"""What the rows of a step hold for code that is not ours: token ids and positions, and heads.

``row_inputs`` gathers token and position of each row from the batch on the device, so that a graph
of that code serves every step. ``pack_heads`` brings queries, keys and values, wherever that code
has left them, into the buffer that our attention reads. References: torch's indexing, as each
function's docstring has it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.attention_arguments import DecodeBatch
from penstock.kernels.gpu.early_launch import EARLY, begin_early

_BLOCK = 256


@triton.jit(do_not_specialize=["count", "num_decode"])
def _row_inputs_kernel(
    tokens, slots, positions, rows, last_token, last_position, token_out, position_out, count,
    num_decode, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    token = tl.load(tokens + row, mask=inside, other=0)
    decoding = (token < 0) & (row < num_decode)
    slot = tl.load(rows + row, mask=decoding, other=-1)
    decoding = decoding & (slot >= 0)
    chunk_slot = tl.load(slots + row, mask=inside & (token >= 0), other=-1)
    position = tl.load(positions + row, mask=chunk_slot >= 0, other=0)
    last = tl.load(last_token + slot, mask=decoding, other=0)
    position += tl.load(last_position + slot, mask=decoding, other=0)
    token = tl.where(decoding, last, tl.maximum(token, 0))
    tl.store(token_out + row, token.to(tl.int64), mask=inside)
    tl.store(position_out + row, position.to(tl.int64), mask=inside)


def row_inputs(
    tokens: Tensor,
    slots: Tensor,
    positions: Tensor,
    batch: DecodeBatch,
    last_token: Tensor,
    token_out: Tensor,
    position_out: Tensor,
) -> None:
    """Token and position of N rows, as int64; 0 and 0 of padding.

    A row whose token is -1 has the last token and the position of its slot in ``batch``, another
    one its own position, if its slot is not -1.

    tokens, slots, positions: [N] int32; last_token: [slots] int32; token_out, position_out: [N]
    int64.
    """
    count = len(token_out)
    if count:
        _row_inputs_kernel[(triton.cdiv(count, _BLOCK),)](
            tokens, slots, positions, batch.rows, last_token, batch.last_position, token_out,
            position_out, count, len(batch.rows), _BLOCK, EARLY, num_warps=4, launch_pdl=EARLY,
        )  # fmt: skip


@triton.jit
def _pack_part(
    source, row_stride, head_stride, target, row,
    HEADS: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """The heads of one row: queries, keys or values."""
    head = tl.arange(0, PADDED)[:, None]
    column = tl.arange(0, PADDED_DIM)[None, :]
    inside = (head < HEADS) & (column < DIM)
    value = tl.load(source + row * row_stride + head * head_stride + column, mask=inside)
    tl.store(target + head * DIM + column, value, mask=inside)


@triton.jit
def _pack_heads_kernel(
    query, key, value, out, query_row, query_head, key_row, key_head, value_row, value_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PADDED: tl.constexpr, KV_PADDED: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    target = out + row * (HEADS + 2 * KV_HEADS) * DIM
    _pack_part(query, query_row, query_head, target, row, HEADS, PADDED, DIM, PADDED_DIM)
    target += HEADS * DIM
    _pack_part(key, key_row, key_head, target, row, KV_HEADS, KV_PADDED, DIM, PADDED_DIM)
    target += KV_HEADS * DIM
    _pack_part(value, value_row, value_head, target, row, KV_HEADS, KV_PADDED, DIM, PADDED_DIM)


def pack_heads(query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
    """``out[:] = cat((query, key, value), 1)``.

    query: [N, Hq, D]; key, value: [N, Hkv, D], of any strides; out: [N, Hq + 2 Hkv, D] contiguous.
    """
    rows, heads, dim = query.shape
    kv_heads = key.shape[1]
    parts = [each if each.stride(2) == 1 else each.contiguous() for each in (query, key, value)]
    strides = [each.stride(at) for each in parts for at in (0, 1)]
    if rows:
        _pack_heads_kernel[(rows,)](
            *parts, out, *strides, heads, kv_heads, triton.next_power_of_2(heads),
            triton.next_power_of_2(kv_heads), dim, triton.next_power_of_2(dim), EARLY,
            num_warps=8 if heads * dim > 4096 else 4, launch_pdl=EARLY,
        )  # fmt: skip
