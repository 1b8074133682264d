"""The estimates of ``penstock plan --gpus`` beside the measured tables of docs/benchmarks.md."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.loadtest.offline.offline_requests import draw_requests
from penstock.protocol.config import (
    CacheConfig,
    Config,
    DeviceConfig,
    LoadingConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.protocol.model_info import read_model_info
from penstock.services.worker.gpus import GPUS, NVLINK4, PCIE4
from penstock.services.worker.layouts.division import Layout
from penstock.services.worker.layouts.evaluation import Engine, Evaluator, Workload
from penstock.services.worker.layouts.given_gpus import given_gpus
from penstock.services.worker.layouts.roofline import (
    STAGE_SECONDS,
    EngineCost,
    Rates,
    Rows,
    StageCost,
    rates_of,
)
from penstock.services.worker.model_shape import read_shape

PAGE = (Path(__file__).resolve().parents[3] / "docs/benchmarks.md").read_text()
FACTOR, MIXED_FACTOR = 1.25, 1.35
"""As docs/planning.md says."""
STEP = 8192
"""Tokens of the largest step in all of these."""
USUAL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 40_960,
    "dtype": "bfloat16",
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 151_936}


def sizes(hidden: int, width: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    found = {"hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers}
    return USUAL | found | {"num_attention_heads": heads} | others


MODELS = {
    "Qwen3-0.6B": sizes(1024, 3072, 28, 16, **QWEN3, tie_word_embeddings=True),
    "Qwen3-1.7B": sizes(2048, 6144, 28, 16, **QWEN3, tie_word_embeddings=True),
    "Qwen3-8B": sizes(4096, 12_288, 36, 32, **QWEN3),
    "Gemma-2-2B": sizes(
        2304, 9216, 26, 8, architectures=["Gemma2ForCausalLM"], vocab_size=256_000, head_dim=256,
        num_key_value_heads=4, max_position_embeddings=8192, sliding_window=4096,
        query_pre_attn_scalar=256, tie_word_embeddings=True,
    ),
    "Llama-3.2-3B": sizes(3072, 8192, 28, 24, vocab_size=128_256, tie_word_embeddings=True),
    "Phi-3-mini": sizes(
        3072, 8192, 32, 32, architectures=["Phi3ForCausalLM"], vocab_size=32_064, head_dim=96,
        num_key_value_heads=32, max_position_embeddings=4096, sliding_window=2047,
    ),
    "Qwen2.5-7B": sizes(
        3584, 18_944, 28, 28, architectures=["Qwen2ForCausalLM"], vocab_size=152_064,
        num_key_value_heads=4,
    ),
    "Mistral-7B": sizes(
        4096, 14_336, 32, 32, architectures=["MistralForCausalLM"], vocab_size=32_768,
        sliding_window=None,
    ),
}  # fmt: skip
LARGE = {"32B": sizes(5120, 25_600, 64, 64, **QWEN3)}
A, B = "Qwen3-0.6B", "Qwen3-8B"


@functools.cache
def engine(
    model: str,
    gpu: str,
    utilization: float = 0.9,
    compress: str = "auto",
    tensor: int = 1,
    pipeline: int = 1,
) -> Engine:
    """Of one GPU with all of a model, as a worker would have it, or of several."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps((MODELS | LARGE)[model]))
        config = Config(
            model=ModelConfig(model=folder),
            cache=CacheConfig(gpu_memory_utilization=utilization),
            scheduler=SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=STEP),
            device=DeviceConfig(device="cuda"),
            loading=LoadingConfig(load_format="dummy", compress_weights=compress),
        )
        given = given_gpus(f"{tensor * pipeline}x{gpu}")
        found = Evaluator(read_model_info(folder), config, given, Workload(1, 1))
        one = found.engine(Layout(tensor, pipeline, 1))
    assert isinstance(one, Engine)
    return one


def row(first: str, heading: str = "") -> list[str]:
    """The cells behind the first one of a row of the page, the first such below a heading; first:
    what that cell says, ahead of a colon if there is one."""
    page = PAGE[PAGE.index(f"\n{heading}\n") :] if heading else PAGE
    found = re.search(rf"^\| {re.escape(first)}(?:: [^|]*)? \|(.*)\|$", page, re.MULTILINE)
    assert found, f"docs/benchmarks.md has no row {first}"
    return [cell.strip() for cell in found[1].split("|")]


def below(first: str) -> list[str]:
    """The cells behind the first two of the row below that one."""
    found = re.search(rf"^\| {first} \|.*\n\| \| [^|]* \|(.*)\|$", PAGE, re.MULTILINE)
    assert found, f"docs/benchmarks.md has no second row of {first}"
    return [cell.strip() for cell in found[1].split("|")]


def numbers(cell: str) -> list[float]:
    """Those of a cell that stand outside of brackets, in its order."""
    return [
        float(text.replace(",", ""))
        for text in re.findall(r"\d[\d,]*\.?\d*", re.sub(r"\(.*?\)", "", cell))
    ]


def decode_ms(cost: EngineCost, rows: int, context: float) -> float:
    return 1e3 * cost.decode_seconds(rows, context)


@functools.cache
def lengths() -> tuple[list[int], list[int]]:
    drawn = draw_requests(256, (100, 1024), (100, 1024), 0)
    return [len(prompt) for prompt in drawn.prompts], drawn.output_lens


def w1(cost: EngineCost) -> float:
    """Output tokens a second of 256 requests that begin together."""
    inputs, outputs = lengths()
    seconds = sum(inputs) * cost.prefill_seconds(sum(inputs) // len(inputs), STEP)
    for step in range(1, max(outputs)):
        pairs = zip(inputs, outputs, strict=True)
        contexts = [count + step for count, wanted in pairs if wanted > step]
        seconds += cost.decode_seconds(len(contexts), sum(contexts) / len(contexts))
    return sum(outputs) / seconds


Compared = tuple[str, Callable[[], float], float]
SHAPES, PARTS, GROWS = "### Other shapes", "### Where a step goes", "### How a step grows"


def single_gpu_figures() -> list[Compared]:
    """Name, estimate and measured figure of steps and loads."""
    found: list[Compared] = []

    def add(name: str, estimate: Callable[[], float], measured: float) -> None:
        found.append((name, estimate, measured))

    def steps(name: str, cost: Callable[[], EngineCost], cell: str, context: int) -> None:
        for size, measured in zip((1, 8, 64), numbers(cell), strict=True):
            add(
                f"{name}, batch {size}",
                lambda size=size: decode_ms(cost(), size, context),
                measured,
            )

    def of(model: str, gpu: str, *how: Any) -> Callable[[], EngineCost]:
        return lambda: engine(model, gpu, *how).cost

    for letter, model in (("A", A), ("B", B)):
        h200 = of(model, "h200")
        add(f"W1 {letter}", lambda h200=h200: w1(h200()), numbers(row(f"W1 {letter}")[4])[0])
        steps(f"W2 {letter}", h200, row(f"W2 {letter}, batch 1 / 8 / 64")[4], 384)
        add(
            f"W3 {letter}",
            lambda h200=h200: 1 / h200().prefill_seconds(4096, STEP),
            numbers(row(f"W3 {letter}")[4])[0],
        )
        add(
            f"W4a {letter}",
            lambda h200=h200: h200().rate(64, 1024, 128, STEP) / 128,
            numbers(row(f"W4a {letter}")[4])[0],
        )
        add(
            f"W4a {letter}, median between tokens",
            lambda h200=h200: decode_ms(h200(), 64, 1088),
            numbers(below(f"W4a {letter}")[3])[2],
        )
        steps(f"W2 {letter} on an H100", of(model, "h100"), row(
            "W2 A, ms a step, batch 1 / 8 / 64" if letter == "A"
            else "W2 B, the same, from plain weights"
        )[0], 384)  # fmt: skip
    for letter, model, measured in zip("AB", (A, B), numbers(
        row("W1 A / B, output tokens/s")[0]), strict=True
    ):  # fmt: skip
        add(f"W1 {letter} on an H100", lambda m=model: w1(engine(m, "h100").cost), measured)
    add(
        "W4a A on an H100",
        lambda: engine(A, "h100").cost.rate(64, 1024, 128, STEP) / 128,
        numbers(row("W4a A, requests/s; TTFT median; ITL median, p99, ms")[0])[0],
    )
    for model in MODELS:
        if model == B:
            continue
        one, many, rate = row(model, SHAPES)
        cost = of(model, "h100", 0.95)
        add(f"{model}, batch 1", lambda c=cost: decode_ms(c(), 1, 256), numbers(one)[0])
        add(f"{model}, batch 64", lambda c=cost: decode_ms(c(), 64, 256), numbers(many)[0])
        add(f"{model}, W1", lambda c=cost: w1(c()), numbers(rate)[0])
    return [*found, *grown_steps()]


def grown_steps() -> list[Compared]:
    """Steps of more rows and of longer contexts."""
    found: list[Compared] = []
    cells = [numbers(cell)[0] / 1e3 for cell in row("step", PARTS)]
    pairs = [(model, rows) for model in (A, B) for rows in (1, 64, 256)]
    for (model, rows), measured in zip(pairs, cells, strict=True):
        one = functools.partial(engine, model, "h200", 0.9, "never")
        found.append((
            f"{model}, a step of {rows} rows",
            lambda one=one, rows=rows: decode_ms(one().cost, rows, 460), measured,
        ))  # fmt: skip
    many = row("step, µs", GROWS)
    for rows, cell in zip((1, 4, 16, 64, 256, 512, 1024), many, strict=True):
        found.append((
            f"A, {rows} rows behind 512",
            lambda rows=rows: decode_ms(engine(A, "h200").cost, rows, 537),
            numbers(cell)[0] / 1e3,
        ))  # fmt: skip
    for rows, name in ((1, "1 row, step, µs"), (8, "8 rows, step, µs"), (64, "64 rows, step, µs")):
        for context, cell in zip((128, 1024, 8192, 36_000, 131_072), row(name, GROWS), strict=True):
            if cell != "–":
                found.append((
                    f"A, {rows} rows behind {context}",
                    lambda r=rows, c=context: decode_ms(engine(A, "h200").cost, r, c + 25),
                    numbers(cell)[0] / 1e3,
                ))  # fmt: skip
    return found


def within(estimate: float, measured: float, factor: float) -> bool:
    return 1 / factor <= estimate / measured <= factor


FIGURES = {name: (estimate, measured) for name, estimate, measured in single_gpu_figures()}


@functools.cache
def ratio(name: str) -> float:
    estimate, measured = FIGURES[name]
    return estimate() / measured


@pytest.mark.parametrize("name", FIGURES)
def test_an_estimate_is_near_what_was_measured(name: str) -> None:
    assert within(ratio(name), 1.0, FACTOR), f"{ratio(name):.2f} of {FIGURES[name][1]}"


def test_a_step_with_a_prompt_beside_decode_rows_is_near_what_was_measured() -> None:
    cost = engine(A, "h200").cost
    for rows in (64, 160):
        alone, *beside = (numbers(cell)[0] for cell in row(f"{rows} decode rows"))
        assert within(decode_ms(cost, rows, 1088), alone, FACTOR)
        for tokens, measured in zip((256, 1280), beside, strict=True):
            found = 1e3 * cost.prompt_seconds(tokens, STEP, Rows(decode=rows, context=1088))
            assert within(found, measured, MIXED_FACTOR if tokens <= 256 else FACTOR)


def test_pieces_of_a_prompt_beside_a_few_rows_are_near_what_was_measured() -> None:
    record = (Path(__file__).resolve().parents[3] / "docs/benchmark-record.md").read_text()
    found = re.search(
        r"14 rows of B at 1,088 positions take ([\d.]+) ms alone, and (.*?)\s+ms more with (.*?)"
        r"\s+tokens of prefill",
        record,
        re.DOTALL,
    )
    assert found
    cost = engine(B, "h200", 0.9, "never").cost
    alone, more, tokens = float(found[1]), numbers(found[2]), numbers(found[3])
    assert len(more) == len(tokens) == 5
    for count, longer in zip(map(int, tokens), more, strict=True):
        seconds = cost.prompt_seconds(count, STEP, Rows(decode=14, context=1088))
        assert within(1e3 * seconds, alone + longer, MIXED_FACTOR if count <= 256 else FACTOR)


def test_the_estimates_lean_to_no_side() -> None:
    """A factor that all of them are off by would be a share that is wrong."""
    ratios = sorted(map(ratio, FIGURES))
    assert len(ratios) > 50
    assert 0.95 < ratios[len(ratios) // 2] < 1.05


def plain_stage(model: str, rates: Rates, **how: Any) -> StageCost:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[model]))
        config = Config(model=ModelConfig(model=folder), loading=LoadingConfig(load_format="dummy"))
        return StageCost(read_shape(read_model_info(folder), config), rates, 2, **how)


def test_a_window_bounds_what_a_step_reads_and_what_a_prompt_attends_to() -> None:
    rates = rates_of(GPUS["h100"])
    windows, full = (plain_stage(model, rates) for model in ("Phi-3-mini", "Mistral-7B"))

    def more(cost: StageCost, **rows: Any) -> float:
        """Seconds that 32,000 positions take more than 3,000."""
        long, short = ({**rows, name: n} for n in (32_000, 3000) for name in ["context"])
        return cost.seconds(Rows(**long)) - cost.seconds(Rows(**short))

    assert more(windows, decode=8) == 0.0 < more(full, decode=8)
    far, near = (windows.seconds(Rows(prefill=512, behind=n)) for n in (32_000, 3000))
    assert far == near
    assert full.seconds(Rows(prefill=512, behind=32_000)) > 1.1 * full.seconds(
        Rows(prefill=512, behind=3000)
    )


def test_an_all_reduce_is_bound_by_latency_when_small_and_by_the_link_when_large() -> None:
    """NCCL between H100s: 23 µs for 0.5 MB among six; between RTX 4090s: 42 µs for 8 bytes."""
    fast, slow = Rates(1.0, 1.0, NVLINK4), Rates(1.0, 1.0, PCIE4)
    assert fast.all_reduce(1 << 40, 1) == 0.0
    assert within(1e6 * fast.all_reduce(1 << 19, 6), 23, 1.25)
    assert within(1e6 * slow.all_reduce(8, 8), 42, 1.25)
    gigabyte = fast.all_reduce(1 << 30, 4)
    assert within(2 * 3 / 4 * (1 << 30) / gigabyte, 366e9, 1.05)
    assert slow.all_reduce(1 << 30, 4) > 10 * gigabyte


def test_batches_under_way_keep_the_stages_of_a_pipeline_busy() -> None:
    """One batch passes all stages one behind the other, and nobody computes beside it."""
    rates = rates_of(GPUS["h100"])
    stage = plain_stage(A, rates)
    one, four = EngineCost([stage], rates), EngineCost([stage] * 4, rates, 4)
    alone = EngineCost([stage] * 4, rates)
    passed = 3 * rates.send(stage.sent_bytes(1), hosts=False) + 4 * STAGE_SECONDS
    lone = stage.seconds(Rows(decode=1, context=100))
    for cost in (alone, four):
        assert cost.decode_seconds(1, 100) == pytest.approx(4 * lone + passed)
    step = one.decode_seconds(64, 100) + STAGE_SECONDS
    assert four.decode_seconds(256, 100) == pytest.approx(4 * step, rel=0.1)
    assert alone.decode_seconds(64, 100) == pytest.approx(4 * step, rel=0.1)
    far = EngineCost([stage] * 4, rates, hosts=True)
    assert far.decode_seconds(1, 100) > alone.decode_seconds(1, 100)


def test_a_prompt_in_several_steps_passes_a_pipeline_piece_by_piece() -> None:
    rates = rates_of(GPUS["h100"])
    stage = plain_stage(A, rates)
    one, two = EngineCost([stage], rates), EngineCost([stage] * 2, rates, 2)
    whole = one.prompt_seconds(4 * STEP, STEP)
    assert whole < two.prompt_seconds(4 * STEP, STEP) < 1.5 * whole
    in_turn = EngineCost([stage] * 2, rates)
    assert in_turn.prompt_seconds(4 * STEP, STEP) == pytest.approx(2 * whole, rel=0.1)
    assert in_turn.prefill_seconds(STEP, STEP) == pytest.approx(
        2 * two.prefill_seconds(STEP, STEP), rel=0.1
    )
