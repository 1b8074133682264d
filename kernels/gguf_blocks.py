"""Blocks of GGUF files as ``QuantizedWeight``, without rounding.

A row of a tensor is cut into blocks of 32 numbers, or 256 of the K kinds; scales and codes of a
block lie together. Layouts as in ggml (``ggml-common.h``, ``dequantize_row_*``):

| kind | block | number |
| --- | --- | --- |
| Q4_0, Q8_0 | fp16 d, codes | d (code - 8), d code |
| Q4_1, Q5_1 | fp16 d and m, (high bits,) codes | d code + m |
| Q5_0 | fp16 d, high bits, codes | d (code - 16) |
| Q4_K, Q5_K | fp16 d and dmin, 8 s and 8 m of 6 bits, (high bits,) codes | d s code - dmin m |
| Q6_K | codes, 16 scales s of 8 bits, fp16 d | d s (code - 32) |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.quantized_weight import QuantizedWeight, in_half_bytes


class _Parts(NamedTuple):
    codes: Tensor
    """uint8 or int8 [N, K]."""
    group: int
    scales: Tensor
    """[N, G]."""
    offsets: Tensor | None = None


def weight_of_blocks(kind: str, blocks: Tensor) -> QuantizedWeight:
    """blocks: uint8 [N, bytes of a row]."""
    size, unpack = _KINDS[kind]
    parts = unpack(blocks.view(len(blocks), -1, size))
    scales = parts.scales.t().contiguous()
    offsets = None if parts.offsets is None else parts.offsets.float().t().contiguous()
    if parts.codes.dtype == torch.int8:
        return QuantizedWeight("int8", parts.codes, parts.group, scales, offsets=offsets)
    zeros = None
    if offsets is not None:  # codes are as they are, not from the middle
        zeros = torch.zeros(scales.shape, dtype=torch.int16, device=blocks.device)
    codes = in_half_bytes(parts.codes)
    return QuantizedWeight("int4", codes, parts.group, scales, 1, zeros, offsets=offsets)


def _halves(data: Tensor) -> Tensor:
    """fp16 numbers of pairs of bytes, [N, B, 2 C] → [N, B, C]."""
    return data.contiguous().view(torch.float16)


def _low_high(data: Tensor, run: int) -> Tensor:
    """Codes of four bits of which ``run`` low ones come ahead of as many high ones: [N, B, C] →
    uint8 [N, B, 2 C]."""
    runs = data.reshape(*data.shape[:-1], -1, run)
    return torch.stack((runs & 15, runs >> 4), -2).flatten(2)


def _bits(data: Tensor) -> Tensor:
    """32 bits, the lowest first: [N, B, 4] → uint8 [N, B, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data[..., None] >> shifts) & 1).flatten(2)


def _q4_0(blocks: Tensor) -> _Parts:
    return _Parts(
        _low_high(blocks[..., 2:], 16).flatten(1), 32, _halves(blocks[..., :2]).flatten(1)
    )


def _q4_1(blocks: Tensor) -> _Parts:
    scale, least = _halves(blocks[..., :4]).unbind(-1)
    return _Parts(_low_high(blocks[..., 4:], 16).flatten(1), 32, scale, least)


def _q5_0(blocks: Tensor) -> _Parts:
    codes = _low_high(blocks[..., 6:], 16) | (_bits(blocks[..., 2:6]) << 4)
    signed = (codes.to(torch.int8) - 16).flatten(1)
    return _Parts(signed, 32, _halves(blocks[..., :2]).flatten(1))


def _q5_1(blocks: Tensor) -> _Parts:
    scale, least = _halves(blocks[..., :4]).unbind(-1)
    codes = _low_high(blocks[..., 8:], 16) | (_bits(blocks[..., 4:8]) << 4)
    return _Parts(codes.to(torch.int8).flatten(1), 32, scale, least)


def _q8_0(blocks: Tensor) -> _Parts:
    codes = blocks[..., 2:].contiguous().view(torch.int8)
    return _Parts(codes.flatten(1), 32, _halves(blocks[..., :2]).flatten(1))


def _q4_k(blocks: Tensor) -> _Parts:
    scales, offsets = _scales_and_offsets(blocks)
    return _Parts(_low_high(blocks[..., 16:], 32).flatten(1), 32, scales, offsets)


def _q5_k(blocks: Tensor) -> _Parts:
    scales, offsets = _scales_and_offsets(blocks)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    high = (blocks[..., None, 16:48] >> shifts[:, None]) & 1
    codes = _low_high(blocks[..., 48:], 32) | (high.flatten(2) << 4)
    return _Parts(codes.to(torch.int8).flatten(1), 32, scales, offsets)


def _scales_and_offsets(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [N, 8 B] of Q4_K and Q5_K."""
    whole = _halves(blocks[..., :4]).float()
    first, second, rest = torch.split(blocks[..., 4:16], 4, -1)
    scales = torch.cat((first & 63, (rest & 15) | ((first >> 2) & 48)), -1)
    minima = torch.cat((second & 63, (rest >> 4) | ((second >> 2) & 48)), -1)
    found = whole[..., :1] * scales.float(), -whole[..., 1:] * minima.float()
    return found[0].flatten(1), found[1].flatten(1)


def _q6_k(blocks: Tensor) -> _Parts:
    low, high = blocks[..., :128], blocks[..., 128:192]
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)
    pairs = (high.reshape(*high.shape[:-1], 2, 1, 32) >> shifts[:, None]) & 3
    codes = _low_high(low, 64) | (pairs.flatten(2) << 4)
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    whole = _halves(blocks[..., 208:]).float()
    signed = (codes.to(torch.int8) - 32).flatten(1)
    return _Parts(signed, 16, (whole * scales).flatten(1))


_KINDS: dict[str, tuple[int, Callable[[Tensor], _Parts]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
