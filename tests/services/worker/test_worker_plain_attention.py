"""The choice of a backend by measurement, and executors that attend with either."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.worker.plan_driver import PlanDriver
from support.worker.tiny_models import generated, make_model, some_prompts

from penstock.kernels.attention import ReferenceAttention
from penstock.kernels.attention_backend import CacheShape, PlannedBatch, QuerySpans
from penstock.kernels.rotary import RopeParameters
from penstock.kernels.sdpa_attention import SdpaAttention
from penstock.protocol.config import (
    CacheConfig,
    Config,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import Chunk, NewSlot, SlotSampling, StepPlan
from penstock.services.worker.loading import load_executor
from penstock.services.worker.model_executor import ModelExecutor
from penstock.services.worker.model_loading import plain_attention
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.models.dense import DenseConfig
from penstock.services.worker.models.specification import CacheSpecification
from penstock.services.worker.plain_attention import (
    REFERENCE,
    MeasuredLayer,
    PlainAttention,
    choose_plain_attention,
    faster_of,
)

CPU = torch.device("cpu")
CONFIG = DenseConfig(100, 64, 1, 4, 2, 80, 64, 1e-5, RopeParameters(10_000.0), True)
SDPA = PlainAttention(SdpaAttention(), SdpaAttention())
ON_CPU = PlainAttention(ReferenceAttention(), SdpaAttention())
ONE_OF_EACH = PlainAttention(SdpaAttention(), ReferenceAttention())
Folder = Callable[[str], Path]


def silent(note: str) -> None:
    pass


def layer(times: list[float]) -> MeasuredLayer:
    """A layer whose calls are computed and then said to take these times."""
    given: Iterator[float] = iter(times)

    def clock(work: Callable[[], object]) -> float:
        work()
        return next(given)

    return MeasuredLayer(CONFIG, torch.float32, 24, CPU, clock)


def test_the_faster_backend_is_taken_for_each_kind_of_rows() -> None:
    """Times: the reference's and SDPA's for decode, then for chunks."""
    chosen = faster_of(SdpaAttention(), ReferenceAttention(), layer([35e-5, 21e-5, 1e-3, 2e-3]))
    assert isinstance(chosen.decode, SdpaAttention)
    assert isinstance(chosen.prefill, ReferenceAttention)
    assert chosen.summary == (
        "decode attention by torch's SDPA (0.21 ms against 0.35), "
        "prefill attention by the reference (1.00 ms against 2.00)"
    )
    assert chosen.finite_keys


class Failing(SdpaAttention):
    def plan(
        self, spans: QuerySpans, shape: CacheShape, device: torch.device
    ) -> Sequence[PlannedBatch]:
        if spans.counts is not None:
            raise RuntimeError("No available\n kernel")
        return super().plan(spans, shape, device)


def test_a_backend_that_fails_is_not_taken_and_the_summary_says_why() -> None:
    chosen = faster_of(Failing(), ReferenceAttention(), layer([3.0, 1.0, 3.0]))
    assert isinstance(chosen.decode, SdpaAttention)
    assert isinstance(chosen.prefill, ReferenceAttention)
    assert chosen.summary.endswith(
        "by the reference (torch's SDPA failed: RuntimeError: No available kernel)"
    )


def test_on_the_cpu_the_reference_attends_and_nothing_is_measured() -> None:
    assert choose_plain_attention(CONFIG, torch.float32, 16, CPU) is REFERENCE
    assert REFERENCE.summary == ""
    assert not REFERENCE.finite_keys


def test_each_kind_of_layers_has_a_choice_of_its_own() -> None:
    plain, wide = CacheSpecification(2, 16, 4), CacheSpecification(1, 64, 8)
    changes: list[dict[str, Any]] = [{"window": 8}, {"chunk": 8}, {"softcap": 8.0}, {"sinks": True}]
    others = [replace(plain, **each) for each in changes]
    model: Any = SimpleNamespace(caches=[plain, wide, *others], dtype=torch.bfloat16, device=CPU)
    found = plain_attention(model, 16)
    for cache in (plain, wide):
        assert isinstance(found.of(cache).prefill, SdpaAttention)
    assert all(found.of(cache) is REFERENCE for cache in others)
    assert found.finite_keys
    model.caches = others
    assert not plain_attention(model, 16).finite_keys


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_the_cpu_chunks_go_to_sdpa_where_bits_may_depend_on_the_batch(
    dtype: torch.dtype,
) -> None:
    chosen = choose_plain_attention(CONFIG, dtype, 16, CPU)
    assert isinstance(chosen.decode, ReferenceAttention)
    assert isinstance(chosen.prefill, SdpaAttention)
    assert chosen.finite_keys and chosen.summary == ""


def executor_for(
    folder: Path,
    attention: PlainAttention,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> ModelExecutor:
    info = read_model_info(folder)
    capacity = EngineSizes(300, block_size, 16, 256, 512, info.vocab_size)
    return ModelExecutor(load_model(info, dtype, device, silent), capacity, attention)


@pytest.mark.parametrize("attention", [SDPA, ONE_OF_EACH], ids=["sdpa", "one of each"])
@pytest.mark.parametrize(("variant", "block_size"), [("llama-80", 16), ("qwen2-tied", 32)])
def test_greedy_tokens_equal_those_of_transformers(
    variant: str, block_size: int, attention: PlainAttention, tiny_folder: Folder
) -> None:
    prompts = some_prompts([1, 2, 5, 33, 129, 260, 31, 64])
    executor = executor_for(tiny_folder(variant), attention, block_size)
    settings: tuple[dict[str, Any], ...] = ({}, {"chunk": 16, "preemptions": 4})
    for seed, setting in enumerate(settings):
        executor.reset()
        got = PlanDriver(executor, seed).run(prompts, 6, **setting)
        assert got == generated(variant, prompts, 6, got)


def test_what_a_sequence_that_is_not_finite_left_behind_harms_no_other(
    tiny_folder: Folder,
) -> None:
    executor = executor_for(tiny_folder("qwen2-tied"), SDPA)
    prompts = some_prompts([30, 30, 140], 9)
    before = PlanDriver(executor).run(prompts, 6)
    executor.reset()
    with torch.inference_mode():
        executor._model.weights.embedding[301] = torch.nan
    driver = PlanDriver(executor, 1)
    assert driver.run([[1, 2, 301, 4] * 60] * 8 + prompts, 6)[8:] == before
    assert driver.bad == set(range(8))
    executor.reset()
    # Blocks that the eight held are handed out again.
    for seed in range(2, 5):
        executor.reset()
        assert PlanDriver(executor, seed).run(prompts, 6) == before


def logits_of(executor: ModelExecutor, prompt: list[int]) -> torch.Tensor:
    """Logits of the last position; the prompt is computed in two chunks."""
    ids = torch.tensor(prompt, dtype=torch.int32).numpy().tobytes()
    blocks = list(range(-(-len(prompt) // executor.capacity.block_size)))
    new = NewSlot(0, ids, len(prompt), 0, blocks, SlotSampling(0.0, 0, 1.0, 0).packed())
    half = len(prompt) // 2
    executor.execute(StepPlan(1, 1, True, [], [new], [], [Chunk(0, 0, half, False, [])]))
    rest = Chunk(0, half, len(prompt) - half, True, [])
    logits = executor.logits(StepPlan(1, 2, False, [], [], [], [rest]))[0].float().cpu()
    executor.reset()
    return logits


gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attention", [REFERENCE, SDPA, ON_CPU], ids=["reference", "sdpa", "both"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_logits_are_near_those_of_transformers_in_float32(
    device: str, attention: PlainAttention, dtype: torch.dtype, tiny_folder: Folder
) -> None:
    executor = executor_for(
        tiny_folder("llama-80"), attention, dtype=dtype, device=torch.device(device)
    )
    model = make_model("llama-80")
    for prompt in some_prompts([2, 40, 200]):
        with torch.inference_mode():
            wanted = model(torch.tensor([prompt])).logits[0, -1]
        error = (logits_of(executor, prompt) - wanted).abs().max() / wanted.std()
        assert float(error) < (0.01 if dtype == torch.float32 else 0.25)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_measures_both_and_names_the_choice(tiny_folder: Folder) -> None:
    config = Config(
        model=ModelConfig(model=str(tiny_folder("llama-320")), dtype="float32"),
        cache=CacheConfig(num_kv_blocks=300),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256),
        device=DeviceConfig(device="cuda"),
    )
    executor = load_executor(config, silent)
    assert isinstance(executor, ModelExecutor)
    choice = r"attention by (torch's SDPA|the reference) \(\d+\.\d\d ms against \d+\.\d\d\)"
    assert re.fullmatch(
        rf"plain torch kernels: .* lack heads of 320; .*; decode {choice}, prefill {choice}",
        executor.summary,
    )
    prompts = some_prompts([1, 5, 33, 129])
    got = PlanDriver(executor, 3).run(prompts, 8)
    assert got == generated("llama-320", prompts, 8, got)
