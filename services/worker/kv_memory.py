"""The KV memory of a model's layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from penstock.kernels.kv_cache import allocate_kv_cache, clear_blocks
from penstock.services.worker.layer_groups import LayerGroups, block_shapes
from penstock.services.worker.models.specification import CacheSpecification

KVCache = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, each [Hkv, num_blocks, block_size, D]."""


class KVMemory:
    """Keys and values. A block holds as many layers as the largest group has."""

    def __init__(
        self,
        caches: Sequence[CacheSpecification],
        grouped: LayerGroups,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """dtype: of the model, or that of quantized caches.

        Raises ``MemoryError`` where the system does not promise so much, and ``ValueError`` for
        heads that cannot be quantized."""
        shapes = block_shapes(caches, grouped)
        self._keys: list[Tensor] = []
        """One for each distinct shape: [layers, Hkv, num_blocks, block_size, D] …"""
        self._values: list[Tensor] = []
        """… of both."""
        found: list[tuple[Tensor, Tensor] | None] = [None] * len(shapes)
        for kv_heads, dim in dict.fromkeys(shapes):
            places = [at for at, shape in enumerate(shapes) if shape == (kv_heads, dim)]
            keys, values = (
                allocate_kv_cache(len(places), kv_heads, num_blocks, block_size, dim, dtype, device)
                for _ in range(2)
            )
            self._keys.append(keys)
            self._values.append(values)
            for at, key, value in zip(places, keys, values, strict=True):
                found[at] = key, value
        places_of_block = [place for place in found if place is not None]
        self.layers: KVCache = [places_of_block[place] for _, place in grouped.places]
        """For each layer of the model; layers of several groups share one, each in blocks of its
        own."""

    @property
    def caches(self) -> list[Tensor]:
        """All there is, each [layers, Hkv, num_blocks, block_size, D]."""
        return [*self._keys, *self._values]

    def clear(self, blocks: list[int], keys: bool) -> None:
        """Zero these blocks' values in all layers; keys: their keys too."""
        fresh = torch.tensor(blocks, device=self._values[0].device)
        for cache in [*self._values, *self._keys] if keys else self._values:
            clear_blocks(cache, fresh)


class MemoryBlocks:
    """Blocks of KV memory on the CPU as bytes: keys, then values, of each of its layers."""

    def __init__(self, memory: KVMemory, groups: int) -> None:
        """groups: of layers that have block tables of their own."""
        self._caches = memory.caches
        shapes = [(cache.shape[:2], cache.shape[3:]) for cache in self._caches]
        self._counts = [prod((*outer, *inner)) for outer, inner in shapes]
        self._dtype = self._caches[0].dtype
        self.block_bytes = sum(self._counts) * self._dtype.itemsize
        self.layout = f"{self._dtype} {groups} {[[*outer, *inner] for outer, inner in shapes]}"

    @torch.inference_mode()
    def read(self, block: int, into: memoryview) -> None:
        """See ``BlockAccess``."""
        for cache, piece in self._pieces(block, into):
            piece.copy_(cache)

    @torch.inference_mode()
    def write(self, block: int, content: memoryview) -> None:
        """See ``BlockAccess``."""
        for cache, piece in self._pieces(block, content):
            cache.copy_(piece)

    def _pieces(self, block: int, content: memoryview) -> Iterator[tuple[Tensor, Tensor]]:
        """(of KV memory, of ``content``): views of one shape, [layers, Hkv, block_size, D]."""
        values = torch.frombuffer(content, dtype=torch.uint8).view(self._dtype)
        begin = 0
        for cache, count in zip(self._caches, self._counts, strict=True):
            own = cache[:, :, block]
            yield own, values[begin : begin + count].view(own.shape)
            begin += count
