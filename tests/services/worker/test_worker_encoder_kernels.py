"""An encoder by our kernels makes the numbers that torch's operations make.

Without a GPU its kernels run in Triton's interpreter, and there are no graphs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.worker.recorded_steps import recorded, recording
from support.worker.tiny_encoders import FAMILIES, make_encoder, write_encoder
from support.worker.tiny_models import make_model

pytest.importorskip("triton")

from penstock.protocol.config import Config
from penstock.protocol.config.fields import DeviceConfig, ModelConfig, SchedulerConfig
from penstock.protocol.model_info import read_model_info
from penstock.protocol.process.trace import DEVICE, STEP
from penstock.protocol.wire.messages.steps import Chunk, NewSlot, SlotSampling, StepPlan
from penstock.services.worker.encoders import gpu_steps, split_linear
from penstock.services.worker.encoders.executor import EncoderExecutor
from penstock.services.worker.encoders.loading import load_encoder_executor, use_kernels
from penstock.services.worker.encoders.packed_rows import Prompt
from penstock.services.worker.encoders.throttle import REST, Throttle
from penstock.services.worker.models import linear

ON_GPU = torch.cuda.is_available()
LENGTHS = [1, 7, 70, 7, 64, 65, 2]
FEW_LENGTHS = [7, 66, 2]
"""Still one that is cut into tiles, with others around it: the interpreter takes long for each."""
TOLERANCE = 2e-4
SAMPLING = SlotSampling(0.0, 0, 1.0, 0).packed()
MOST_ROWS = 4096
"""Of a step: more than the largest graph holds."""


def prompts(lengths: list[int], second: int = 0) -> list[Prompt]:
    tokens = (np.array([5 + (7 * at + 11 * n) % 90 for at in range(n)], np.int32) for n in lengths)
    return [Prompt(each, second if len(each) > second else 0) for each in tokens]


def executor_of(folder: Path, device: str, **model: Any) -> EncoderExecutor:
    config = Config(
        model=ModelConfig(model=str(folder), **model),
        device=DeviceConfig(device=device, threads=1),
        scheduler=SchedulerConfig(max_num_batched_tokens=MOST_ROWS),
    )
    return load_encoder_executor(config, read_model_info(folder), lambda note: None)


def by_kernels(folder: Path, **model: Any) -> EncoderExecutor:
    executor = executor_of(folder, "cuda" if ON_GPU else "cpu", **model)
    if not ON_GPU:
        use_kernels(executor, torch.device("cpu"), False)
    assert "attention by our kernel" in executor.summary
    assert ("no graphs" in executor.summary) is not ON_GPU
    return executor


def assert_same(
    folder: Path, lengths: list[int], second: int = 0, *, again: bool = False, **model: Any
) -> None:
    """All prompts, the last of them alone, and, if ``again``, all behind it."""
    given = prompts(lengths, second)
    wanted = executor_of(folder, "cpu", **model).compute(given)
    executor = by_kernels(folder, **model)
    last = given[-1:]
    steps = [(given, wanted), (last, wanted[-1:]), (given, wanted)]
    for some, expected in steps if again else steps[:2]:
        found = executor.compute(some)
        np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


IN_SHORT = ("Bert", "MPNet", "ModernBert")
"""Biases of positions, windows, and rotary embedding are among them."""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if ON_GPU or name in IN_SHORT else pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_vectors_by_kernels_are_those_by_torch(family: str, tmp_path: Path) -> None:
    folder = write_encoder(make_encoder(family), tmp_path)
    assert_same(folder, LENGTHS if ON_GPU else FEW_LENGTHS, again=ON_GPU or family == "Bert")


@pytest.mark.slow
def test_vectors_of_many_prompts_by_kernels_are_those_by_torch(tmp_path: Path) -> None:
    assert_same(write_encoder(make_encoder("Bert"), tmp_path), LENGTHS, again=True)


@pytest.mark.parametrize("pooling", ["cls", "last", "max"])
def test_each_kind_of_pooling_is_that_of_torch(pooling: str, tmp_path: Path) -> None:
    folder = write_encoder(make_encoder("Bert", num_hidden_layers=1), tmp_path)
    assert_same(folder, [3, 1, 66], pooling=pooling)


def test_a_classifier_s_logits_and_second_segments_are_those_by_torch(tmp_path: Path) -> None:
    model = make_encoder("Bert", "ForSequenceClassification", num_labels=3, num_hidden_layers=1)
    assert_same(write_encoder(model, tmp_path), [3, 9, 66], second=2)


@pytest.mark.slow
def test_gemma_s_layers_attend_in_both_directions_by_the_kernel(tmp_path: Path) -> None:
    model = make_model("gemma3")
    model.config.use_bidirectional_attention = True
    model.model.config.use_bidirectional_attention = True
    model.model.save_pretrained(tmp_path)
    assert_same(tmp_path, [3, 46])


def test_steps_are_started_while_earlier_ones_run_and_collected_in_their_order(
    tmp_path: Path,
) -> None:
    executor = by_kernels(write_encoder(make_encoder("Bert", num_hidden_layers=1), tmp_path))
    given = prompts([3, 9, 5])
    wanted = executor.compute(given)
    for turn in range(2):
        for number, (prompt, gone) in enumerate(zip(given, ([], [0], [1]), strict=True)):
            new = NewSlot(
                number, prompt.tokens.astype("<i4").tobytes(), len(prompt.tokens), 0, [number],
                SAMPLING, task="embed",
            )  # fmt: skip
            chunk = Chunk(number, 0, len(prompt.tokens), True, [])
            executor.launch(StepPlan(1, number + 1, number == 0, gone, [new], [], [chunk]))
        assert executor.in_flight == len(given) <= executor.max_in_flight
        executor.launch(StepPlan(1, len(given) + 1, False, [2], [], [], []))
        if turn:
            executor.reset()
            assert executor.in_flight == 0 and executor.finished(wait=True) is None
            return
        for number, values in enumerate(wanted):
            result = executor.finished(wait=True)
            assert result is not None and result.step == number + 1
            (found,) = result.pooled
            np.testing.assert_allclose(np.frombuffer(found.values, "<f4"), values, atol=TOLERANCE)
        last = executor.finished(wait=True)
        assert last is not None and last.step == len(given) + 1 and not last.pooled


def test_steps_stand_in_timelines_one_behind_another(tmp_path: Path) -> None:
    executor = by_kernels(write_encoder(make_encoder("Bert", num_hidden_layers=1), tmp_path))
    (prompt,) = prompts([3])
    new = NewSlot(0, prompt.tokens.astype("<i4").tobytes(), 3, 0, [0], SAMPLING, task="embed")
    with recording():
        executor.launch(StepPlan(1, 1, True, [], [new], [], [Chunk(0, 0, 3, True, [])]))
        executor.launch(StepPlan(1, 2, False, [0], [], [], []))
        results = [executor.finished(wait=True) for _ in range(2)]
        found = recorded()
    assert [(name, lane, step) for _, _, name, lane, step in found] == [
        (STEP, DEVICE, 1),
        (STEP, DEVICE, 2),
    ]
    (began, ended, *_), (next_began, next_ended, *_) = found
    assert began < ended <= next_began <= next_ended
    assert [result and result.seconds for result in results] == [
        pytest.approx((end - start) * 1e-9) for start, end, *_ in found
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_steps_of_all_sizes_are_right_with_graphs_and_without(tmp_path: Path) -> None:
    folder = write_encoder(make_encoder("Bert"), tmp_path)
    generator = np.random.default_rng(1)
    cpu, gpu = executor_of(folder, "cpu"), by_kernels(folder)
    for count, longest in (
        (1, 64),
        (2, 64),
        (5, 64),
        (16, 64),
        (64, 48),
        (64, 64),
        (3, 64),
        (1, 9),
    ):
        given = prompts(generator.integers(1, longest, count).tolist())
        np.testing.assert_allclose(gpu.compute(given), cpu.compute(given), atol=1e-3, rtol=1e-3)


def test_kernels_that_compute_other_numbers_or_fail_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_encoder(make_encoder("Bert", num_hidden_layers=1), tmp_path)
    given = prompts(LENGTHS)
    wanted = executor_of(folder, "cpu").compute(given)
    pool_rows = gpu_steps.pool_rows

    def wrong(states: torch.Tensor, *others: Any) -> None:
        pool_rows(states * 1.01, *others)

    def fail(*given: Any) -> None:
        raise RuntimeError("no kernel image")

    for kernel, words in ((wrong, "differ from torch's by 0.01"), (fail, "no kernel image")):
        monkeypatch.setattr(gpu_steps, "pool_rows", kernel)
        executor = executor_of(folder, "cuda" if ON_GPU else "cpu")
        if not ON_GPU:
            use_kernels(executor, torch.device("cpu"), False)
        assert "by torch's operations" in executor.summary and words in executor.summary
        np.testing.assert_allclose(executor.compute(given), wanted, atol=TOLERANCE, rtol=TOLERANCE)


def test_steps_rest_for_longer_than_they_took_while_others_compute_on_the_device() -> None:
    clock, rests = [0.0], []
    throttle = Throttle(lambda: clock[0], rests.append)

    def step(rows: int, seconds: float) -> None:
        begun = clock[0]
        clock[0] += seconds
        throttle.after(rows, begun)

    step(100, 0.010)
    step(100, 0.012)
    step(900, 0.050)
    assert rests == [], "the device is its own"
    step(100, 0.020)
    step(900, 0.100)
    assert rests == [pytest.approx(REST * 0.020), pytest.approx(REST * 0.100)] and REST > 1
    step(100, 0.010)
    assert len(rests) == 2, "the others have ended"


def test_products_in_float32_are_computed_from_two_parts_where_that_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "packed_weight", lambda weight: None)
    folder = write_encoder(make_encoder("Bert", num_hidden_layers=1), tmp_path)
    given = prompts(FEW_LENGTHS)
    wanted = executor_of(folder, "cpu").compute(given)
    executor = by_kernels(folder)
    assert ON_GPU or "products of two bfloat16 parts" in executor.summary
    np.testing.assert_allclose(executor.compute(given), wanted, atol=TOLERANCE, rtol=TOLERANCE)
    monkeypatch.setattr(split_linear, "why_not_split", lambda layer: "9 µs take 10 µs so")
    assert "torch's products: 9 µs take 10 µs so" in by_kernels(folder).summary
