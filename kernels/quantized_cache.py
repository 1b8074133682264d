"""KV caches of one byte a number: int8 or FP8 (e4m3), with a scale for each position's head.

A number is its code times its scale, which is the largest of the D numbers, absolute, over the
largest code: nothing is calibrated, and a position is quantized by itself when it is written. The
scale of numbers among which is a NaN or an infinity is NaN, and so is then what they stand for.

A *page* is what a block holds of one KV head: first the codes, [block_size, D], then their scales,
[block_size] in fp32. So codes of a position begin where loads of 16 bytes may, and a page is as
much one piece of memory as one of a plain cache. A cache is a tensor [..., block_size, D +
SCALE_BYTES] of the codes' type, of which only this module, ``gpu/cache_codes.py`` and the bytes of
``stored_head`` know what is where. D is a multiple of 4, for the scales to be aligned.

Zeros, as blocks are cleared to, stand for zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.cache_kinds import SCALE_BYTES, KVCacheKind

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest code of each type that stands for one."""
LEAST_SCALE = 1e-12
_KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_SCALES = torch.float32
_E4M3_IN_HALF = 256.0
"""What e4m3 is divided by where its bits, shifted, are read as a number of 16 bits: the exponents'
biases differ by 8."""


def cache_type(kind: KVCacheKind, plain: torch.dtype) -> torch.dtype:
    """The type of a cache's tensor; plain: of the model."""
    return plain if kind == "auto" else _KINDS[kind]


def is_quantized(dtype: torch.dtype) -> bool:
    return dtype in LARGEST


def columns(dim: int, dtype: torch.dtype) -> int:
    """The last size of a cache's tensor. Raises ``ValueError`` for heads that no cache of this type
    has room for."""
    if not is_quantized(dtype):
        return dim
    if dim % 4:
        raise ValueError(
            f"heads of {dim} numbers: --kv-cache-dtype takes multiples of 4; leave it out"
        )
    return dim + SCALE_BYTES


def parts(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a quantized cache's codes, [..., block_size, D], and scales, [..., block_size]
    fp32. The last two dimensions of ``cache`` are contiguous."""
    block_size, wide = cache.shape[-2:]
    dim = wide - SCALE_BYTES
    pages = cache.view(torch.int8).flatten(-2)
    codes = pages[..., : block_size * dim].view(*pages.shape[:-1], block_size, dim)
    return codes.view(cache.dtype), pages.view(_SCALES)[..., block_size * dim // SCALE_BYTES :]


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x: [..., D]. Returns codes [..., D] of ``dtype`` and scales [...] fp32."""
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True)
    # Of an infinity the code would be a NaN, which int8 has not: the scale says it.
    scales.masked_fill_(scales.isinf(), torch.nan)
    scales.div_(LARGEST[dtype]).clamp_(min=LEAST_SCALE)
    wide = wide / scales
    codes = wide.round_().nan_to_num_(0.0) if dtype == torch.int8 else wide
    return codes.to(dtype), scales.squeeze(-1)


def dequantize(codes: Tensor, scales: Tensor, out: Tensor | None = None) -> Tensor:
    """codes: [..., D]; scales: [...] fp32. Returns [..., D] fp32."""
    if codes.dtype == torch.int8 or codes.device.type != "cpu":
        return torch.mul(codes.float(), scales.unsqueeze(-1), out=out)
    # torch converts one e4m3 after the other there, forty times as slowly as this.
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return torch.mul(
        bits.view(torch.float16).float(), (scales * _E4M3_IN_HALF).unsqueeze(-1), out=out
    )


def write(x: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Quantize x, [N, Hkv, D], into one layer's cache; see ``kv_cache.write_kv``."""
    block_size = cache.shape[2]
    codes, scales = quantize(x.transpose(0, 1), cache.dtype)
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    of_codes, of_scales = parts(cache)
    of_codes.view(torch.int8)[:, blocks, offsets] = codes.view(torch.int8)
    of_scales[:, blocks, offsets] = scales


def read(cache: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
    """cache: [Hkv, num_blocks, block_size, D + SCALE_BYTES]; rows: [R] of it as [Hkv * num_blocks,
    …]; out: fp32, [R, block_size, D]. Returns the numbers, [R, block_size, D] fp32."""
    found = cache.view(torch.int8).flatten(0, 1).index_select(0, rows)
    return dequantize(*parts(found.view(cache.dtype)), out=out)
