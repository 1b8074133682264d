"""KV caches of a byte a number: what is read back, and that attention over them is attention over
what codes stand for."""

from __future__ import annotations

import pytest
import torch
from support.kernels.scattered_cache import Scattered
from support.kernels.triton_device import error

from penstock.kernels import quantized_cache
from penstock.kernels.attention import ReferenceAttention
from penstock.kernels.attention_backend import AttentionBackend
from penstock.kernels.cache_kinds import KVCacheKind, stored_head
from penstock.kernels.kv_cache import (
    allocate_kv_cache,
    clear_blocks,
    clear_places,
    read_blocks,
    write_kv,
)
from penstock.kernels.sdpa_attention import SdpaAttention

CPU = torch.device("cpu")
KINDS: list[KVCacheKind] = ["int8", "fp8"]
ROUNDED = {"int8": 0.012, "fp8": 0.04}
"""Relative error of normally distributed numbers."""


def cache_of(kind: KVCacheKind, kv_heads: int, blocks: int, size: int, dim: int) -> torch.Tensor:
    dtype = quantized_cache.cache_type(kind, torch.bfloat16)
    return allocate_kv_cache(1, kv_heads, blocks, size, dim, dtype, CPU)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read_back_but_for_rounding(
    kind: KVCacheKind, dtype: torch.dtype
) -> None:
    keys, values = (cache_of(kind, 3, 7, 8, 20) for _ in range(2))
    slots = torch.randperm(56)[:40]
    key, value = (torch.randn(40, 3, 20).to(dtype) for _ in range(2))
    key[7] = 0.0
    value[8] *= 1e-20
    write_kv(key, value, keys, values, slots)
    for plain, cache in ((key, keys), (value, values)):
        blocks = read_blocks(cache, torch.arange(21), dtype).view(3, 56, 20)
        assert blocks.dtype == dtype
        found = blocks[:, slots].transpose(0, 1)
        assert error(found[9:], plain[9:]) < ROUNDED[kind] + 4e-3
        unwritten = torch.ones(56, dtype=torch.bool)
        unwritten[slots] = False
        assert not blocks[:, unwritten].any()
    assert not read_blocks(keys, torch.arange(21), dtype).view(3, 56, 20)[:, slots[7]].any()


def test_every_code_of_e4m3_is_the_number_that_torch_makes_of_it() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    wanted = codes.float()
    finite = wanted.isfinite()
    scales = torch.tensor([0.25])
    found = quantized_cache.dequantize(codes[None], scales)[0]
    assert torch.equal(found[finite], wanted[finite] * 0.25)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_makes_its_head_s_position_nan(
    kind: KVCacheKind, broken: float
) -> None:
    cache = cache_of(kind, 2, 1, 8, 16)
    x = torch.randn(3, 2, 16)
    x[1, 0, 5] = broken
    quantized_cache.write(x, cache, torch.arange(3))
    found = read_blocks(cache, torch.arange(2), torch.float32).view(2, 8, 16)
    assert found[0, 1].isnan().all()
    assert found[1].isfinite().all() and found[0, [0, 2]].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_cleared_blocks_and_places_stand_for_zeros(kind: KVCacheKind) -> None:
    dtype = quantized_cache.cache_type(kind, torch.float32)
    caches = allocate_kv_cache(2, 2, 4, 8, 16, dtype, CPU)
    for cache in caches:
        quantized_cache.write(torch.full((32, 2, 16), torch.nan), cache, torch.arange(32))
    clear_blocks(caches, torch.tensor([1, 3]))
    clear_places(caches[0], torch.arange(8))
    both = [read_blocks(cache, torch.arange(8), torch.float32).view(2, 4, -1) for cache in caches]
    assert not both[0][:, [0, 1, 3]].any() and not both[1][:, [1, 3]].any()
    assert both[1][:, [0, 2]].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_takes_the_bytes_that_plans_count(kind: KVCacheKind) -> None:
    cache = cache_of(kind, 3, 5, 16, 80)
    assert cache.nbytes == 3 * 5 * 16 * stored_head(80, 2, kind)
    assert stored_head(80, 2) == 160


def test_heads_whose_scales_would_not_be_aligned_are_refused() -> None:
    with pytest.raises(ValueError, match="heads of 18 numbers: --kv-cache-dtype takes multiples"):
        cache_of("int8", 1, 2, 8, 18)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("backend", "exact", "dtype"),
    [
        (ReferenceAttention(), True, torch.float32),
        (ReferenceAttention(), False, torch.float32),
        (ReferenceAttention(), False, torch.bfloat16),
        (SdpaAttention(), False, torch.float32),
    ],
    ids=["exact", "float32", "bfloat16", "sdpa"],
)
def test_attention_is_that_over_what_codes_stand_for(
    backend: AttentionBackend, exact: bool, dtype: torch.dtype, kind: KVCacheKind
) -> None:
    plain = Scattered([90, 40, 7], 4, 2, 16, 8, dtype, exact, backend)
    packed = Scattered([90, 40, 7], 4, 2, 16, 8, dtype, exact, backend)
    spans = [(0, 50, 40), (1, 39, 1), (2, 6, 1)]
    for name in ("key_cache", "value_cache"):
        numbers: torch.Tensor = getattr(plain, name)
        shape = numbers.shape
        cache = cache_of(kind, *shape)
        slots = torch.arange(shape[1] * shape[2])
        quantized_cache.write(numbers.flatten(1, 2).transpose(0, 1), cache, slots)
        setattr(packed, name, cache)
        read = read_blocks(cache, torch.arange(shape[0] * shape[1]), dtype).view(shape)
        setattr(plain, name, read)
    for found, wanted in zip(packed.attend(spans), plain.attend(spans), strict=True):
        assert torch.equal(found, wanted) or dtype == torch.bfloat16  # small products are in fp32
        assert error(found, wanted) < 8e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_as_a_decode_row_and_in_chunks(kind: KVCacheKind) -> None:
    sequence = Scattered([300, 20], 6, 3, 16, 16)
    for name in ("key_cache", "value_cache"):
        numbers = getattr(sequence, name)
        cache = cache_of(kind, *numbers.shape)
        slots = torch.arange(numbers.shape[1] * numbers.shape[2])
        quantized_cache.write(numbers.flatten(1, 2).transpose(0, 1), cache, slots)
        setattr(sequence, name, cache)
    whole = sequence.attend([(0, 0, 300)])[0]
    parts = torch.cat(sequence.attend([(0, 0, 140), (1, 0, 20)])[:1] + sequence.attend(
        [(0, 140, 160)]
    ))  # fmt: skip
    assert torch.equal(whole, parts)
    assert torch.equal(whole[299:], sequence.attend([(0, 299, 1), (1, 19, 1)])[0])
