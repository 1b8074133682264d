"""The paged KV cache: blocks of ``block_size`` positions, handed out by the scheduler.

One layer's keys (and likewise values) are one tensor [Hkv, num_blocks, block_size, D]: heads
outermost, so that the blocks of a sequence can be gathered straight into the [heads, positions,
D] operand of a batched matrix product. Source of the idea: Kwon et al., "Efficient Memory
Management for Large Language Model Serving with PagedAttention" (2023).

A cache of a byte a number is laid out otherwise within a block: see ``quantized_cache``.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from penstock.kernels import quantized_cache


def allocate_kv_cache(
    num_layers: int,
    num_kv_heads: int,
    num_blocks: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Keys or values of all layers: zeros [layers, Hkv, num_blocks, block_size, D]; D is more where
    ``dtype`` is quantized: see ``quantized_cache.columns``.

    On the CPU the zeros are the system's own: a page takes memory when it is first written to.
    Raises ``MemoryError`` where the system does not promise so much, and ``ValueError`` for heads
    that cannot be quantized.
    """
    columns = quantized_cache.columns(head_dim, dtype)
    shape = (num_layers, num_kv_heads, num_blocks, block_size, columns)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return _unwritten_zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def _unwritten_zeros(count: int) -> Tensor:
    """[count] uint8 in a mapping of its own, which is given back with the tensor.

    Not ``torch.empty``: its allocator may hand out pages that were written to before.
    """
    try:
        pages = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as failure:
        raise MemoryError(f"the system refuses {count} bytes: {failure.strerror}") from failure
    return torch.frombuffer(pages, dtype=torch.uint8)


def clear_blocks(cache: Tensor, blocks: Tensor) -> None:
    """Zero these blocks in all layers. cache: from ``allocate_kv_cache``; blocks: [B] int64.

    What a block held before is masked from its new owner's scores, but a weight of 0 times a NaN
    or an infinity in V would still be NaN.
    """
    if quantized_cache.is_quantized(cache.dtype):
        cache = cache.view(torch.int8)
    cache.index_fill_(2, blocks, 0)


def clear_places(cache: Tensor, slot_mapping: Tensor) -> None:
    """Zero these positions of one layer's cache; see ``write_kv``."""
    if quantized_cache.is_quantized(cache.dtype):
        _, scales = quantized_cache.parts(cache)
        scales[:, slot_mapping // cache.shape[2], slot_mapping % cache.shape[2]] = 0
        return
    cache.view(cache.shape[0], -1, cache.shape[-1])[:, slot_mapping] = 0


def read_blocks(cache: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values of some blocks of one layer.

    cache: [Hkv, num_blocks, block_size, D]; rows: [R] int64 of it as [Hkv * num_blocks, …]; dtype:
    of the result, where the cache is quantized. Returns [R, block_size * D].
    """
    if quantized_cache.is_quantized(cache.dtype):
        return quantized_cache.read(cache, rows).to(dtype).flatten(1)
    return cache.view(-1, cache.shape[2] * cache.shape[3]).index_select(0, rows)


def read_blocks_into(cache: Tensor, rows: Tensor, into: Tensor) -> None:
    """As ``read_blocks``, in fp32. into: [R, block_size, D] contiguous, overwritten."""
    if quantized_cache.is_quantized(cache.dtype):
        quantized_cache.read(cache, rows, out=into)
    else:
        torch.index_select(cache.flatten(0, 1), 0, rows, out=into)


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write the K and V of N positions into one layer's cache.

    key, value: [N, Hkv, D]; key_cache, value_cache: [Hkv, num_blocks, block_size, D] of the same
    dtype, or quantized; slot_mapping: [N] int64, ``block * block_size + offset`` of each row. Equal
    entries are allowed only in a block that nobody reads.
    """
    if quantized_cache.is_quantized(key_cache.dtype):
        quantized_cache.write(key, key_cache, slot_mapping)
        quantized_cache.write(value, value_cache, slot_mapping)
        return
    heads, blocks, block_size, dim = key_cache.shape
    for source, cache in ((key, key_cache), (value, value_cache)):
        flat = cache.view(heads, blocks * block_size, dim)
        flat.index_copy_(1, slot_mapping, source.transpose(0, 1))
