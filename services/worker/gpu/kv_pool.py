"""KV memory of a CUDA device in which a block is one piece, so that one copy takes all of it away.

A block is a row of *pages* [Hkv, block_size, D]: keys, then values, of each of its layers. The
kernels know pages alone. Of a layer they get all pages from its first one on, and block tables that
name, for a block, how many pages lie ahead of it: ``BatchState`` multiplies by ``pages``.
"""

from __future__ import annotations

import torch

from penstock.kernels.gpu.attention_arguments import LayerCache


class KVPool:
    def __init__(
        self,
        num_blocks: int,
        layers: int,
        kv_heads: int,
        block_size: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """layers: of a block."""
        shape = (num_blocks, layers, 2, kv_heads, block_size, dim)
        self.blocks = torch.zeros(shape, dtype=dtype, device=device)
        """[num_blocks, layers, 2, Hkv, block_size, D]: keys and values."""
        self.pages = 2 * layers
        """Of a block."""

    def layer(self, place: int) -> LayerCache:
        """Keys and values of the layer at this place of each block."""
        pages = self.blocks.flatten(0, 2)
        return LayerCache(pages[2 * place :], pages[2 * place + 1 :])
