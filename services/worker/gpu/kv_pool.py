"""KV memory of a CUDA device in which a block is one piece, so that one copy takes all of it away.

A block is a row of *pages* [Hkv, block_size, D]: keys, then values, of each of its layers. The
kernels know pages alone. Of a layer they get all pages from its first one on, and block tables that
name, for a block, how many pages lie ahead of it: ``BatchState`` multiplies by ``pages``.
"""

from __future__ import annotations

import math

import torch

from penstock.kernels.gpu.attention_arguments import LayerCache, layer_cache
from penstock.kernels.quantized_cache import columns, is_quantized


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
        memory: torch.Tensor | None = None,
    ) -> None:
        """layers: of a block; dtype: of the model, or that of quantized caches; memory: uint8
        [bytes], to lie in, zeros; by default it is torch's.

        Raises ``ValueError`` for heads that cannot be quantized, and for too little memory."""
        shape = (num_blocks, layers, 2, kv_heads, block_size, columns(dim, dtype))
        zeros = torch.int8 if is_quantized(dtype) else dtype
        if memory is None:
            memory = torch.zeros(shape, dtype=zeros, device=device)
        else:
            size = math.prod(shape) * zeros.itemsize
            if size > len(memory):
                raise ValueError(f"KV memory of {size} bytes in {len(memory)}")
            memory = memory[:size].view(zeros).view(shape)
        self.blocks = memory.view(dtype)
        """[num_blocks, layers, 2, Hkv, block_size, D]: keys and values; see ``quantized_cache``."""
        self.pages = 2 * layers
        """Of a block."""
        self.layout = f"{dtype} pages {list(shape[1:])}"
        """What the order and the meaning of a block's bytes depend on."""

    def layer(self, place: int) -> LayerCache:
        """Keys and values of the layer at this place of each block."""
        pages = self.blocks.flatten(0, 2)
        return layer_cache(pages[2 * place :], pages[2 * place + 1 :])
