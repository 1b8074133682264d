"""The KV memory of a model's layers."""

from __future__ import annotations

from collections.abc import Sequence

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
        """Raises ``MemoryError`` where the system does not promise so much."""
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

    def clear(self, blocks: list[int], keys: bool) -> None:
        """Zero these blocks' values in all layers; keys: their keys too."""
        fresh = torch.tensor(blocks, device=self._values[0].device)
        for cache in [*self._values, *self._keys] if keys else self._values:
            clear_blocks(cache, fresh)
