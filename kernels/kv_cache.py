"""The paged KV cache: blocks of ``block_size`` positions, handed out by the scheduler.

One layer's keys (and likewise values) are one tensor [Hkv, num_blocks, block_size, D]: heads
outermost, so that the blocks of a sequence can be gathered straight into the [heads, positions,
D] operand of a batched matrix product. Source of the idea: Kwon et al., "Efficient Memory
Management for Large Language Model Serving with PagedAttention" (2023).
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor


def allocate_kv_cache(
    num_layers: int,
    num_kv_heads: int,
    num_blocks: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Keys or values of all layers: zeros [layers, Hkv, num_blocks, block_size, D].

    On the CPU the zeros are the system's own: a page takes memory when it is first written to.
    Raises ``MemoryError`` where the system does not promise so much.
    """
    shape = (num_layers, num_kv_heads, num_blocks, block_size, head_dim)
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
    cache.index_fill_(2, blocks, 0.0)


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write the K and V of N positions into one layer's cache.

    key, value: [N, Hkv, D]; key_cache, value_cache: [Hkv, num_blocks, block_size, D] of the same
    dtype; slot_mapping: [N] int64, ``block * block_size + offset`` of each row. Equal entries are
    allowed only in a block that nobody reads.
    """
    heads, blocks, block_size, dim = key_cache.shape
    for source, cache in ((key, key_cache), (value, value_cache)):
        flat = cache.view(heads, blocks * block_size, dim)
        flat.index_copy_(1, slot_mapping, source.transpose(0, 1))
