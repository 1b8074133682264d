"""``penstock bench kernels``: what it times, and the floor beside it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pipeline.in_process import called

from penstock.kernels.rms_norm import rms_norm, scaled_norm_weight
from penstock.kernels.rotary import RopeParameters, apply_rotary
from penstock.kernels.sampling.samplers import SAMPLERS
from penstock.loadtest.kernel_benches import eager_kernels as eager
from penstock.loadtest.kernel_benches.cpu_kernels import cpu_cases
from penstock.loadtest.kernel_benches.gpu_kernels import gpu_cases
from penstock.loadtest.kernel_benches.kernel_case import Grid, Maker
from penstock.loadtest.kernel_benches.kernel_timer import KernelTimer
from penstock.loadtest.roofline.decoder_cost import attention_pairs
from penstock.loadtest.roofline.device_limits import known_limits
from penstock.services.worker.models.dense import DenseConfig

CPU = torch.device("cpu")
SMALL = DenseConfig(
    vocab_size=600,
    hidden_size=128,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=256,
    rms_norm_eps=1e-6,
    rope=RopeParameters(10_000.0),
    tie_word_embeddings=True,
    qk_norm=True,
)
GRID = Grid(batches=[1, 3], contexts=[20], rows=[5, 40], prefixes=[0, 33], block_size=16)


def test_each_kernel_of_the_cpu_is_timed_beside_its_floor(tmp_path: Path) -> None:
    path = tmp_path / "k.json"
    done = called(
        "bench", "kernels", "tiny", "--device", "cpu", "--output-json", str(path),
        "--batch-size", "1", "2", "--context", "40", "--rows", "33", "--cached-prefix", "0", "16",
        "--repetitions", "2", "--bandwidth-gb", "10", "--peak-tflops", "0.5",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(path.read_text())
    assert result["limits"]["source"] == "flags"
    rows = result["kernels"]
    assert {row["kernel"] for row in rows} == {
        "rms_norm", "silu_and_mul", "norm, rope, write", "decode_attention", "prefill_attention",
        "draw", "linear",
    }  # fmt: skip
    for row in rows:
        assert 0 < row["least_us"] <= row["median_us"] <= row["most_us"], row
        floor = 1e6 * max(row["bytes"] / 10e9, row["flops"] / 0.5e12)
        assert row["floor_us"] == pytest.approx(floor)
        assert row["share"] == pytest.approx(floor / row["median_us"])
        assert row["size"] in done.stdout
    prefill = {row["size"]: row["flops"] for row in rows if row["kernel"] == "prefill_attention"}
    assert prefill == {
        "33 after 0": 4 * 4 * 64 * sum(range(1, 34)),
        "33 after 16": 4 * 4 * 64 * sum(range(17, 50)),
    }
    decode = {row["size"]: row["bytes"] for row in rows if row["kernel"] == "decode_attention"}
    assert decode["2 x 40"] == 2 * 2 * (40 * 2 + 4) * 64 * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")
def test_the_calls_of_each_gpu_kernel_are_right_for_the_interpreter() -> None:
    maker = Maker(SMALL, torch.float32, CPU)
    cases = list(gpu_cases(maker, GRID))
    assert {case.kernel for case in cases} == {
        "scatter", "embed", "rms_norm", "add_rms_norm", "silu_and_mul", "rope_and_cache",
        "decode_attention", "prefix_attention", "prefill_attention", "gated product", "draw",
        "layer, plain weights", "sample: top-k, top-p", "sample: penalties",
        "sample: both", "sample: flat top-p", "logprobs", "skinny_linear",
        "few_rows_linear", "torch.mm", "eager rms_norm", "eager add_rms_norm", "eager silu_and_mul",
        "eager rope_and_cache", *(f"sampler: {name}" for name in SAMPLERS if name != "temperature"),
    }  # fmt: skip
    seen = set()
    for case in cases:
        assert case.bytes > 0, case
        if case.kernel not in seen or case.kernel.endswith("attention"):
            seen.add(case.kernel)
            case.make()()


def test_the_eager_operations_compute_what_the_kernels_references_do() -> None:
    maker = Maker(SMALL, torch.float32, CPU)
    x, weight = maker.normal(7, 4, 32), maker.normal(32)
    scaled = scaled_norm_weight(weight)
    torch.testing.assert_close(eager.rms_norm(x, weight, 1e-6), rms_norm(x, scaled, 1e-6))
    cos, sin = maker.tables(7)
    turned = apply_rotary(x, cos[:, None], sin[:, None])
    torch.testing.assert_close(eager.rotate(x, *eager.plain_tables(maker, 7)), turned)


def test_cpu_and_gpu_kernels_count_the_same_arithmetic() -> None:
    maker = Maker(SMALL, torch.float32, CPU)
    flops = [
        {case.size: case.flops for case in cases(maker, GRID) if case.kernel == name}
        for cases, name in ((gpu_cases, "torch.mm"), (cpu_cases, "linear"))
    ]
    assert flops[0] == flops[1]
    assert flops[0]["down 128 x 256, 3 rows"] == 2 * 3 * 128 * 256


def test_pairs_of_query_and_key_are_those_of_a_causal_mask() -> None:
    for start, count in ((0, 1), (7, 5), (100, 1)):
        mask = torch.ones(count, start + count).tril(start)
        assert attention_pairs(start, count) == int(mask.sum())
        for window in (1, 4, 7, 8, 12, 200):
            seen = mask.triu(start - window + 1)
            assert attention_pairs(start, count, window) == int(seen.sum())


def test_attention_with_a_window_reads_and_computes_no_more_than_it() -> None:
    """The GPU's cases count keys behind those of the row itself, which are in its input."""
    whole, windowed = (Maker(SMALL, torch.float32, CPU, window=window) for window in (0, 8))
    for cases, own in ((gpu_cases, 0), (cpu_cases, 1)):
        found = []
        for maker in (whole, windowed):
            chosen = [case for case in cases(maker, GRID) if case.kernel.endswith("attention")]
            found.append({case.size: case for case in chosen if "share" not in case.size})
        all_seen, seen = found
        (decode,) = (size for size in seen if size.startswith("3 x"))
        spared = 20 - own - 7
        of_position = 2 * 3 * SMALL.num_kv_heads * SMALL.head_dim * 4
        assert all_seen[decode].bytes - seen[decode].bytes == spared * of_position
        assert seen[decode].flops == 3 * 4 * SMALL.num_heads * SMALL.head_dim * 8
        assert seen["40 after 33"].flops == 4 * SMALL.num_heads * SMALL.head_dim * 40 * 8
        for case in seen.values():
            if cases is cpu_cases or not torch.cuda.is_available():
                case.make()()


def test_a_call_is_never_timed_shorter_than_it_is() -> None:
    for cold in (False, True):
        timer = KernelTimer(CPU, repetitions=3, warm_up=1, cold=cold)
        times = timer.times(lambda: time.sleep(0.002))
        assert 0.002 <= times.least <= times.median <= times.most


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [("NVIDIA H200", 4.8e12), ("NVIDIA H100 80GB HBM3", 3.35e12), ("NVIDIA H100 PCIe", 2.0e12)],
)
def test_a_known_gpu_has_the_rates_of_its_data_sheet(name: str, bandwidth: float) -> None:
    limits = known_limits(name, "bfloat16")
    assert limits is not None
    assert limits.bandwidth == bandwidth
    assert limits.floor(bandwidth, 0) == 1.0
    assert known_limits(name, "float32") is None, "the sheet's rate is that of 16 bits"
    assert known_limits(f"{name} NVL", "bfloat16") is None, "another product"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--batch-size", "0"], 2, "--batch-size"),
        (["--dtype", "int4"], 2, "--dtype"),
        (["/no/such/folder"], 3, "/no/such/folder"),
    ],
)
def test_wrong_flags_and_folders_are_named(arguments: list[str], code: int, words: str) -> None:
    done = called("bench", "kernels", *arguments)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr
