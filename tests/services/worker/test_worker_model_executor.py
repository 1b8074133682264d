"""The executor against transformers' own greedy search, and the identity of its results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.worker.plain_logprobs import check_outputs, check_prompts
from support.worker.plan_driver import GREEDY, PlanDriver
from support.worker.tiny_models import (
    FAMILIES,
    VARIANTS,
    enlarged,
    generated,
    make_model,
    seen_through_blocks,
    some_prompts,
)
from transformers import AutoModelForCausalLM

from penstock.kernels import activation
from penstock.kernels.activation import silu_and_mul
from penstock.loadtest.models.make_model import make_tokenizer
from penstock.protocol.grammar.compiler import make_tokenizer as make_vocabulary
from penstock.protocol.grammar.request import Grammar
from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import (
    Chunk,
    NewSlot,
    SlotAdjustments,
    SlotSampling,
    StepPlan,
)
from penstock.protocol.wire.messages.tokens import Vector
from penstock.services.worker.cpu_threads import StepThreads
from penstock.services.worker.layer_groups import group_layers
from penstock.services.worker.memory import EXTRA_BLOCKS
from penstock.services.worker.memory_plan import block_bytes
from penstock.services.worker.model_executor import Hidden, ModelExecutor
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.weights import named_tensors
from penstock.services.worker.slots import PlanError, PlannedStep

CPU = torch.device("cpu")
CUTS: list[dict[str, int]] = [
    {"chunk": 10_000},
    {"chunk": 16},
    {"preemptions": 6},
    {"running": 1, "chunk": 1},
]
Folder = Callable[[str], Path]


def silent(note: str) -> None:
    pass


def executor_for(
    folder: Path,
    *,
    kind: type[ModelExecutor] = ModelExecutor,
    dtype: torch.dtype = torch.float32,
    block_size: int = 8,
    budget: int = 256,
    slots: int = 16,
    blocks: int = 600,
    longest: int = 512,
) -> Any:
    info = read_model_info(folder)
    model = load_model(info, dtype, CPU, silent, longest=longest)
    groups = group_layers(model.caches).groups
    capacity = EngineSizes(
        blocks, block_size, slots, budget, longest, info.vocab_size, groups=groups
    )
    return kind(model, capacity)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_greedy_tokens_equal_those_of_transformers(variant: str, tiny_folder: Folder) -> None:
    prompts = some_prompts([1, 2, 33, 129])
    executor = executor_for(tiny_folder(variant))
    got = PlanDriver(executor, 0).run(prompts, 8, chunk=24, preemptions=6)
    assert got == generated(variant, prompts, 8, got)


@pytest.mark.parametrize("settings", CUTS, ids=str)
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=[] if name == "llama-tied-biases" else pytest.mark.slow)
        for name in VARIANTS
    ],
)
def test_greedy_tokens_equal_those_of_transformers_however_prompts_are_cut(
    variant: str, settings: dict[str, int], tiny_folder: Folder
) -> None:
    prompts = some_prompts([1, 2, 33, 5, 64, 129, 260])[: 4 if settings.get("chunk") == 1 else 7]
    executor = executor_for(tiny_folder(variant))
    got = PlanDriver(executor, 2).run(prompts, 12, **settings)
    assert got == generated(variant, prompts, 12, got)


@pytest.mark.parametrize("variant", list(FAMILIES))
def test_every_family_chooses_the_tokens_of_transformers(variant: str, tiny_folder: Folder) -> None:
    prompts = some_prompts([1, 33, 150])
    executor = executor_for(tiny_folder(variant))
    got = PlanDriver(executor, 1).run(prompts, 8, chunk=24, preemptions=3)
    assert got == generated(variant, prompts, 8, got)


def test_where_all_blocks_are_seen_besides_a_window_hides_nothing(tiny_folder: Folder) -> None:
    info, prompts = read_model_info(tiny_folder("llama")), some_prompts([1, 33, 129])
    model = load_model(info, torch.float32, CPU, silent)
    assert isinstance(model, Decoder)
    changed = Decoder(seen_through_blocks(model.specification, window=20), model.weights)
    executor = ModelExecutor(changed, EngineSizes(600, 8, 16, 256, 512, info.vocab_size))
    got = PlanDriver(executor, 1).run(prompts, 8, chunk=24, preemptions=2)
    assert got == generated("llama", prompts, 8, got)


@pytest.mark.parametrize("more", [{"width": 48}, {"kv_heads": 2}, {"width": 48, "kv_heads": 1}])
def test_layers_of_different_sizes_have_right_tokens_and_as_much_memory_as_was_counted(
    more: dict[str, int], tiny_folder: Folder
) -> None:
    info, prompts = read_model_info(tiny_folder("llama")), some_prompts([1, 33, 129])
    model = load_model(info, torch.float32, CPU, silent)
    assert isinstance(model, Decoder)
    larger = enlarged(model, **more)
    assert larger.num_parameters == sum(map(torch.numel, named_tensors(larger.weights).values()))
    executor = ModelExecutor(larger, EngineSizes(600, 8, 16, 256, 512, info.vocab_size))
    keys_of_position = 16 * (2 + 2 + more.get("kv_heads", 0))
    assert block_bytes(larger.caches, 8, 4) == 4 * 8 * 2 * keys_of_position
    held = sum(each.nbytes for layer in executor._memory.layers for each in layer)
    assert held == (600 + EXTRA_BLOCKS) * block_bytes(larger.caches, 8, 4)
    got = PlanDriver(executor, 1).run(prompts, 8, chunk=24, preemptions=2)
    assert got == generated("llama", prompts, 8, got)


def test_sequences_beyond_the_trained_length_have_the_long_factors_of_longrope(
    tiny_folder: Folder,
) -> None:
    prompts = some_prompts([520, 700])
    executor = executor_for(tiny_folder("phi3-longrope"), longest=1000)
    got = PlanDriver(executor, 1).run(prompts, 8, chunk=200)
    assert got == generated("phi3-longrope", prompts, 8, got)


@pytest.mark.parametrize(("block_size", "budget"), [(16, 64), (32, 20), (64, 2048)])
def test_block_size_and_budget_do_not_change_the_tokens(
    block_size: int, budget: int, tiny_folder: Folder
) -> None:
    prompts = some_prompts([3, 40, 200, 65, 128, 17])
    executor = executor_for(tiny_folder("qwen3"), block_size=block_size, budget=budget)
    got = PlanDriver(executor, 5).run(prompts, 8, preemptions=3)
    assert got == generated("qwen3", prompts, 8, got)


def test_the_last_layer_ends_with_the_sampled_rows_unless_a_prompts_logprobs_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Folder
) -> None:
    gated: list[int] = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        gated.append(len(x))
        return silu_and_mul(x)

    monkeypatch.setattr(activation, "silu_and_mul", counted)
    executor = executor_for(tiny_folder("qwen3"))
    for asked in (None, 1):
        new = NewSlot(
            0, bytes(4 * 200), 200, 0, list(range(25)), GREEDY.packed(), prompt_logprobs=asked
        )
        executor.execute(StepPlan(1, 1, True, [], [new], [], [Chunk(0, 0, 200, True, [])]))
        first, *_, end = gated
        assert first >= 200
        assert end == first if asked else end <= 16
        gated.clear()


class Recorder(ModelExecutor):
    """Keeps the logits of every sampled row by (choice, output position)."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.logits: dict[tuple[int, int], torch.Tensor] = {}

    def row_logits(self, step: PlannedStep, hidden: Hidden) -> torch.Tensor:
        logits = super().row_logits(step, hidden)
        slots = self.slots
        for row, slot in enumerate(step.sampled.tolist()):
            self.logits[int(slots.choice[slot]), int(slots.num_output[slot])] = logits[row].clone()
        return logits


@pytest.mark.parametrize(
    ("variant", "threads"),
    [
        ("qwen3", (1, 2)),
        *(
            pytest.param(name, (1, 1), marks=pytest.mark.slow)
            for name in ("qwen2", "llama-tied-biases", "cohere2", "starcoder2")
        ),
        ("gemma2", (1, 1)),
    ],
)
def test_logits_have_the_same_bits_in_every_batch_chunking_and_preemption(
    variant: str, threads: tuple[int, int], tiny_folder: Folder
) -> None:
    lengths = [1, 4, 37, 129, 12]
    prompts = some_prompts(lengths, 3)
    samplings = [
        SlotSampling([0.0, 0.8, 1.2][i % 3], [0, 20][i % 2], [1.0, 0.9][i % 2], 99 + i)
        for i in range(len(lengths))
    ]
    executor = executor_for(tiny_folder(variant), kind=Recorder)
    executor.threads = StepThreads(*threads)
    reference_tokens, reference = None, None
    for seed, settings in enumerate(
        (
            {"chunk": 10_000, "running": 1},
            {"chunk": 1, "running": 2},
            {"chunk": 7},
            {"chunk": 100, "running": 3},
            {"preemptions": 8},
            {},
        )
    ):
        executor.reset()
        executor.logits = {}
        tokens = PlanDriver(executor, seed).run(
            prompts,
            6,
            samplings=samplings,
            choices=list(range(len(prompts))),
            **settings,  # type: ignore[arg-type]
        )
        if reference is None:
            reference_tokens, reference = tokens, executor.logits
            assert len(reference) == 6 * len(lengths)
            continue
        assert tokens == reference_tokens
        for row, logits in executor.logits.items():
            assert torch.equal(logits, reference[row]), (settings, row)


def test_a_cached_prefix_gives_the_same_tokens_as_computing_it(tiny_folder: Folder) -> None:
    executor = executor_for(tiny_folder("llama3"))
    prompt = some_prompts([50])[0]
    ids = np.array(prompt, "<i4").tobytes()
    blocks = [9, 3, 77, 21, 5, 40, 41]
    first = executor.execute(
        StepPlan(
            1,
            1,
            True,
            [],
            [NewSlot(2, ids, 50, 0, blocks, GREEDY.packed())],
            [],
            [Chunk(2, 0, 50, True, [])],
        )
    )
    # Six full blocks are shared; the seventh is the new sequence's own.
    shared = NewSlot(0, ids, 50, 48, blocks[:6], GREEDY.packed())
    second = executor.execute(
        StepPlan(1, 2, False, [], [shared], [], [Chunk(0, 48, 2, True, [100])])
    )
    decoded, sampled = np.frombuffer(second.tokens, "<i4")
    assert sampled == np.frombuffer(first.tokens, "<i4")[0]
    third = np.frombuffer(executor.execute(StepPlan(1, 3, False, [], [], [], [])).tokens, "<i4")
    assert third.tolist()[0] == decoded
    assert len(third) == 2


def test_sequences_with_one_prefix_share_blocks_within_a_step(tiny_folder: Folder) -> None:
    """Each layer writes K and V before it attends, so one step may compute and use a prefix."""
    executor = executor_for(tiny_folder("qwen2"))
    prompt = some_prompts([44])[0]
    ids = np.array(prompt, "<i4").tobytes()
    owner = NewSlot(0, ids, 44, 0, [0, 1, 2, 3, 4, 5], GREEDY.packed())
    guest = NewSlot(1, ids, 44, 40, [0, 1, 2, 3, 4, 6], GREEDY.packed())
    plan = StepPlan(
        1, 1, True, [], [owner, guest], [], [Chunk(0, 0, 44, True, []), Chunk(1, 40, 4, True, [])]
    )
    first, second = np.frombuffer(executor.execute(plan).tokens, "<i4")
    assert first == second == generated("qwen2", [prompt], 1)[0][0]


def test_a_continued_sequence_draws_what_it_would_have_drawn(tiny_folder: Folder) -> None:
    executor = executor_for(tiny_folder("qwen3"))
    prompt = some_prompts([20])[0]
    sampling = SlotSampling(1.3, 0, 0.95, 2**64 - 5)
    whole = PlanDriver(executor).run([prompt], 16, samplings=[sampling])[0]
    executor.reset()
    ids = np.array(prompt + whole[:7], "<i4").tobytes()
    new = NewSlot(4, ids, 20, 0, list(range(6)), sampling.packed())
    plans = [StepPlan(1, 1, True, [], [new], [], [Chunk(4, 0, 27, True, [])])]
    plans += [StepPlan(1, step, False, [], [], [], []) for step in range(2, 10)]
    rest = [int(np.frombuffer(executor.execute(plan).tokens, "<i4")[0]) for plan in plans]
    assert rest == whole[7:]
    assert len(set(whole)) > 4


def test_a_sequence_that_is_not_finite_is_reported_and_harms_no_other(tiny_folder: Folder) -> None:
    executor = executor_for(tiny_folder("qwen2"))
    prompts = some_prompts([30, 30, 140], 9)
    poison = 301
    before = PlanDriver(executor).run(prompts, 8)
    executor.reset()
    with torch.inference_mode():
        executor._model.weights.embedding[poison] = torch.nan
    sick = [*prompts[:1], [1, 2, poison, 4], *prompts[1:]]
    driver = PlanDriver(executor, 1)
    after = driver.run(sick, 8)
    assert driver.bad == {1}
    assert [after[0], *after[2:]] == before
    # Its blocks hold NaN now; whoever gets them next is not harmed.
    assert PlanDriver(executor, 2).executor.reset() is None
    assert PlanDriver(executor, 2).run(prompts, 8) == before


class Whole:
    """Brings the hidden state as it is."""

    name = "whole"

    def pool(self, hidden: npt.NDArray[np.float32]) -> bytes:
        if hidden.shape != (64,):
            raise ValueError(f"hidden has the shape {hidden.shape}")
        return hidden.tobytes()

    def event(self, values: bytes) -> Vector:
        return Vector(values)


class Broken(Whole):
    def pool(self, hidden: npt.NDArray[np.float32]) -> bytes:
        raise KeyError("whole")


def test_a_task_gets_the_last_hidden_state_of_its_prompt_and_fails_alone(
    tiny_folder: Folder,
) -> None:
    folder = tiny_folder("qwen2")
    executor = executor_for(folder)
    executor.tasks = {"whole": Whole(), "broken": Broken()}
    prompts = some_prompts([9, 30, 4, 5, 6])
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tasks = ["whole", "whole", "broken", "unknown", ""]
    for ask in (None, 0):  # with logprobs of the last prompt all rows are computed
        added, chunks = [], []
        for slot, (prompt, task) in enumerate(zip(prompts, tasks, strict=True)):
            ids, size = np.array(prompt, "<i4").tobytes(), len(prompt)
            listed = None if task else ask
            blocks = list(range(4 * slot, 4 * slot + 4))
            added.append(NewSlot(slot, ids, size, 0, blocks, GREEDY.packed(), 0, listed, task=task))
            chunks.append(Chunk(slot, 0, size, True, []))
        result = executor.execute(StepPlan(1, 1, True, [], added, [], chunks))
        assert [one.row for one in result.pooled] == [0, 1]
        for one in result.pooled:
            with torch.inference_mode():
                found = reference(torch.tensor([prompts[one.row]]), output_hidden_states=True)
            expected = found.hidden_states[-1][0, -1].numpy()
            assert np.allclose(np.frombuffer(one.values, "<f4"), expected, atol=1e-4)
        reasons = {one.row: one.reason for one in result.failures}
        assert "KeyError" in reasons.pop(2) and "does not do the task" in reasons.pop(3)
        assert reasons == {}


def test_a_slot_whose_sampling_cannot_be_read_fails_alone(tiny_folder: Folder) -> None:
    executor = executor_for(tiny_folder("qwen2"))
    (prompt,) = some_prompts([3])
    ids = np.array(prompt, "<i4").tobytes()
    good, cut = GREEDY.packed(), GREEDY.packed()[:-1]
    for step, kinds in enumerate(([good, good], [good, cut, good, b""], [good, good]), 1):
        added = [NewSlot(i, ids, 3, 0, [i], kind) for i, kind in enumerate(kinds)]
        chunks = [Chunk(i, 0, 3, True, []) for i in range(len(kinds))]
        result = executor.execute(StepPlan(1, step, True, [], added, [], chunks))
        unread = [row for row, kind in enumerate(kinds) if kind != good]
        assert [(one.row, one.status) for one in result.failures] == [(row, 500) for row in unread]
        assert all("cannot be read" in one.reason for one in result.failures)
        tokens = np.frombuffer(result.tokens, "<i4")
        assert {int(tokens[row]) for row, kind in enumerate(kinds) if kind == good} == {
            generated("qwen2", [prompt], 1)[0][0]
        }


def test_a_failed_step_drops_all_slots_until_a_full_plan(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = executor_for(tiny_folder("llama"))
    ids = np.array([5, 6, 7], "<i4").tobytes()
    new = NewSlot(0, ids, 3, 0, [0], GREEDY.packed())
    good = StepPlan(1, 1, True, [], [new], [], [Chunk(0, 0, 3, True, [])])
    first = executor.execute(good)
    with monkeypatch.context() as patch:
        patch.setattr(executor, "hidden", lambda step: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            executor.execute(StepPlan(1, 2, False, [], [], [], []))
    with pytest.raises(PlanError, match="full plan"):
        executor.execute(StepPlan(1, 3, False, [], [], [], []))
    again = executor.execute(StepPlan(1, 9, True, [], [new], [], [Chunk(0, 0, 3, True, [])]))
    assert again.tokens == first.tokens
    assert len(executor.execute(StepPlan(1, 10, False, [], [], [], [])).tokens) == 4


def test_masks_of_a_failed_step_touch_no_later_one(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = executor_for(tiny_folder("llama"))
    size = executor.capacity.vocab_size
    executor.grammars.serve(
        lambda: make_vocabulary(make_tokenizer(size).to_str(), size, [2]), patience=20.0
    )
    ids = np.array([5, 6, 7], "<i4").tobytes()
    innocent = NewSlot(0, ids, 3, 0, [0], GREEDY.packed())
    adjustments = SlotAdjustments(grammar=Grammar("regex", "[0-9]+"))
    bound = NewSlot(0, ids, 3, 0, [0], SlotSampling(0.0, 0, 1.0, 0, 0.0, adjustments).packed())
    chunk = [Chunk(0, 0, 3, True, [])]
    expected = executor.execute(StepPlan(1, 1, True, [], [innocent], [], chunk)).tokens
    digits = executor.execute(StepPlan(1, 2, True, [], [bound], [], chunk)).tokens
    assert digits != expected
    for step in (3, 5):
        with monkeypatch.context() as patch:
            patch.setattr(executor, "hidden", lambda step: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                executor.execute(StepPlan(1, step, True, [], [bound], [], chunk))
        other = StepPlan(1, step + 1, True, [], [innocent if step == 3 else bound], [], chunk)
        assert executor.execute(other).tokens == (expected if step == 3 else digits)


def test_bf16_tokens_are_close_to_the_top_of_the_fp32_logits(tiny_folder: Folder) -> None:
    """Teacher-forced: each bf16 token is nearly the likeliest for transformers in fp32."""
    executor = executor_for(tiny_folder("qwen3"), dtype=torch.bfloat16)
    prompts = some_prompts([5, 64, 150, 20])
    outputs = PlanDriver(executor, 2).run(prompts, 16)
    model = make_model("qwen3")
    agreed = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        behind = logits.max(-1).values - chosen
        assert float(behind.max()) < 0.05 * float(logits.std()) * 8
        agreed += int((behind == 0).sum())
    assert agreed >= 0.8 * 64


def test_logprobs_are_those_of_transformers(tiny_folder: Folder) -> None:
    folder = tiny_folder("qwen3")
    check_outputs(PlanDriver(executor_for(folder), 2), folder, some_prompts([40, 5, 100, 9]))


def test_logprobs_of_prompts_in_chunks_are_those_of_transformers(tiny_folder: Folder) -> None:
    folder = tiny_folder("qwen3")
    check_prompts(PlanDriver(executor_for(folder), 3), folder, some_prompts([40, 5, 100, 9]))
