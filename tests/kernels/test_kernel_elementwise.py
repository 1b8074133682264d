"""RMSNorm, SiLU·mul, rotary embedding and the cache write against plain float64 computations."""

from __future__ import annotations

import math
from typing import Any

import psutil
import pytest
import torch

from penstock.kernels.activation import ACTIVATIONS, gated, plain, silu_and_mul
from penstock.kernels.kv_cache import allocate_kv_cache, clear_blocks, write_kv
from penstock.kernels.layer_norm import layer_norm_fp32
from penstock.kernels.rms_norm import rms_norm, scaled_norm_weight
from penstock.kernels.rotary import (
    RopeParameters,
    apply_rotary,
    cos_sin_table,
    inverse_frequencies,
)

MIB = 1 << 20
CPU = torch.device("cpu")


def private_bytes() -> int:
    """Memory that this process has written to and holds for itself."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def of_transformers(kind: str, table: Any, **more: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies and the factor of attention, for heads of 64."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=table)
    found: tuple[torch.Tensor, float] = ROPE_INIT_FUNCTIONS[kind](config, CPU, **more)
    return found


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows = x.double()
    return rows / torch.sqrt((rows * rows).sum(-1, keepdim=True) / rows.shape[-1] + eps) * weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 8), (7, 64), (3, 4, 130)])
def test_rms_norm_equals_the_formula(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (3 * torch.randn(shape)).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    expected = plain_norm(x, weight.double(), 1e-5)
    scale = expected.abs().max()
    got = rms_norm(x, scaled_norm_weight(weight), 1e-5)
    assert (got - expected).abs().max() < TOLERANCE[dtype] * scale


def test_rms_norm_takes_one_weight_for_each_head() -> None:
    x, weight = torch.randn(5, 3, 32), torch.randn(3, 32)
    normed = rms_norm(x, scaled_norm_weight(weight), 1e-6)
    for head in range(3):
        expected = plain_norm(x[:, head], weight[head].double(), 1e-6)
        assert (normed[:, head] - expected).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_and_mul_equals_the_formula(dtype: torch.dtype) -> None:
    gate_up = (4 * torch.randn(9, 2 * 33)).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    expected = gate / (1 + torch.exp(-gate)) * up
    assert (silu_and_mul(gate_up) - expected).abs().max() < TOLERANCE[dtype] * 30


FORMULAS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x) ** 2,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_activations_equal_their_formulas_gated_and_not(name: str, dtype: torch.dtype) -> None:
    rows = torch.cat(
        (4 * torch.randn(9, 66), torch.tensor([[-2e4, -30.0, 30.0, 2e4] * 16 + [0.0] * 2]))
    )
    rows = rows.to(dtype)
    gate, up = rows.double().chunk(2, -1)
    for got, want in (
        (plain(name)(rows), FORMULAS[name](rows.double())),
        (gated(name)(rows), FORMULAS[name](gate) * up),
    ):
        assert got.dtype == dtype
        assert ((got - want).abs() <= TOLERANCE[dtype] * (1 + want.abs())).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_layer_norm_equals_the_formula(dtype: torch.dtype, biased: bool) -> None:
    x = (3 + 2 * torch.randn(7, 50)).to(dtype)
    weight, bias = torch.randn(50), torch.randn(50) if biased else None
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    want = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    want = want if bias is None else want + bias.double()
    assert (layer_norm_fp32(x, weight, bias, 1e-5) - want).abs().max() < 1e-5


def test_silu_of_huge_negative_and_positive_gates_is_finite() -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 1.0, 1.0]])
    assert torch.equal(silu_and_mul(gate_up), torch.tensor([[0.0, 200.0]]))


def test_elementwise_results_do_not_depend_on_the_place_in_the_batch() -> None:
    rows = torch.randn(203, 2 * 37)
    norm_weight = scaled_norm_weight(torch.randn(74))
    activated, normed = silu_and_mul(rows), rms_norm(rows, norm_weight, 1e-6)
    centred = layer_norm_fp32(rows, norm_weight, None, 1e-6)
    others = {name: gated(name)(rows) for name in ACTIVATIONS}
    for first, last in ((0, 4), (1, 5), (6, 7), (7, 203), (100, 137)):
        part = rows[first:last]
        for name, whole in others.items():
            assert torch.equal(gated(name)(part), whole[first:last]), name
        assert torch.equal(layer_norm_fp32(part, norm_weight, None, 1e-6), centred[first:last])
        assert torch.equal(silu_and_mul(rows[first:last]), activated[first:last])
        assert torch.equal(rms_norm(rows[first:last], norm_weight, 1e-6), normed[first:last])


def test_rotated_rows_do_not_depend_on_the_place_in_the_batch() -> None:
    fused = torch.randn(203, 5, 20)
    cos, sin = cos_sin_table(20, 203, RopeParameters(theta=10_000.0), CPU)
    cos, sin = cos[:, None], sin[:, None]
    whole = apply_rotary(fused[:, :3], cos, sin)
    for first, last in ((0, 4), (6, 7), (7, 203), (100, 137)):
        part = slice(first, last)
        assert torch.equal(apply_rotary(fused[part, :3], cos[part], sin[part]), whole[part])


def test_rotary_rotates_each_pair_by_position_times_frequency() -> None:
    rope = RopeParameters(theta=10_000.0)
    positions = torch.tensor([0, 1, 5, 900])
    x = torch.randn(4, 3, 16)
    cos, sin = cos_sin_table(16, 1000, rope, CPU)
    got = apply_rotary(x, cos[positions][:, None], sin[positions][:, None])
    for row, position in enumerate(positions.tolist()):
        for pair in range(8):
            angle = position * 10_000.0 ** (-2 * pair / 16)
            first, second = x[row, :, pair].double(), x[row, :, pair + 8].double()
            want = (
                first * math.cos(angle) - second * math.sin(angle),
                second * math.cos(angle) + first * math.sin(angle),
            )
            # The angle is formed in fp32: its error grows with the position.
            limit = 1e-5 + position * 3e-7
            assert (got[row, :, pair] - want[0]).abs().max() < limit
            assert (got[row, :, pair + 8] - want[1]).abs().max() < limit


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_frequencies_equal_those_of_transformers(truncate: bool) -> None:
    rope = RopeParameters(
        1e6, "yarn", 4.0, original_max_position_embeddings=4096, beta_fast=16.0, truncate=truncate
    )
    table = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16.0,
        "truncate": truncate,
    }
    expected, _ = of_transformers("yarn", table)
    assert torch.allclose(inverse_frequencies(64, rope), expected.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("positions", [4096, 4097])
def test_longrope_takes_the_factors_of_the_longest_sequence(positions: int) -> None:
    short, long = [1.0 + 0.1 * i for i in range(32)], [2.0 + i for i in range(32)]
    table = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": 4096,
        "factor": 32.0,
    }
    rope = RopeParameters(
        1e4, "longrope", original_max_position_embeddings=4096, short_factors=tuple(short),
        long_factors=tuple(long),
    )  # fmt: skip
    expected, _ = of_transformers("longrope", table, seq_len=positions)
    got = inverse_frequencies(64, rope.for_length(positions))
    assert torch.allclose(got, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "rope",
    [
        RopeParameters(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192),
        RopeParameters(500_000.0, "llama3", 32.0, 1.0, 4.0, 256),
        RopeParameters(10_000.0, "linear", 4.0),
        RopeParameters(10_000.0, "dynamic", 2.0),
    ],
)
def test_scaled_frequencies_equal_those_of_transformers(rope: RopeParameters) -> None:
    table = {
        "rope_type": rope.rope_type,
        "rope_theta": rope.theta,
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
    }
    expected, scale = of_transformers(rope.rope_type, table, seq_len=100)
    assert scale == 1.0
    assert torch.equal(inverse_frequencies(64, rope), expected.float())


def test_an_unknown_rope_type_is_named() -> None:
    with pytest.raises(ValueError, match=r"'xpos'.*llama3"):
        inverse_frequencies(8, RopeParameters(1e4, "xpos"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_rows_land_in_their_slots_and_nowhere_else(dtype: torch.dtype) -> None:
    keys, values = (allocate_kv_cache(1, 2, 5, 8, 4, dtype, CPU)[0] for _ in range(2))
    fused = torch.randn(3, 6, 4).to(dtype)
    key, value = fused[:, 2:4], fused[:, 4:]
    slots = torch.tensor([13, 0, 39])
    write_kv(key, value, keys, values, slots)
    for row, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, 8)
        assert torch.equal(keys[:, block, offset], key[row])
        assert torch.equal(values[:, block, offset], value[row])
    assert int((keys.abs().sum((0, 3)) > 0).sum()) == 3


def test_the_cpus_kv_memory_is_taken_when_it_is_written_to() -> None:
    before = private_bytes()
    cache = allocate_kv_cache(4, 2, 4096, 64, 128, torch.float32, CPU)
    assert cache.numel() * 4 == 1 << 30
    assert private_bytes() - before < 64 * MIB
    clear_blocks(cache, torch.arange(256))
    assert private_bytes() - before < 192 * MIB
    assert not cache[:, :, ::512].any()


def test_kv_memory_that_the_system_does_not_promise_is_an_error_with_its_size() -> None:
    with pytest.raises(MemoryError, match=f"refuses {1 << 48} bytes"):
        allocate_kv_cache(1 << 10, 1 << 10, 1 << 12, 1 << 6, 1 << 8, torch.float32, CPU)


def test_clearing_blocks_leaves_the_others() -> None:
    cache = allocate_kv_cache(2, 3, 6, 8, 4, torch.float32, CPU)
    cache.fill_(torch.nan)
    cache[:, :, 2] = 7.0
    clear_blocks(cache, torch.tensor([5, 0]))
    assert (cache[:, :, [0, 5]] == 0).all()
    assert (cache[:, :, 2] == 7).all()
    assert cache[:, :, [1, 3, 4]].isnan().all()
