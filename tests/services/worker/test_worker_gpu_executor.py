"""The GPU's executor against transformers and against the plain one.

Without a GPU its kernels run in Triton's interpreter, launch by launch: the same code but for
graphs and streams.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.worker.asked_slots import EVERY_KIND, asking, biased, ids
from support.worker.plain_logprobs import check_outputs, check_prompts
from support.worker.plan_driver import GREEDY, PlanDriver
from support.worker.repeated_work import Repeated
from support.worker.tiny_models import generated, some_prompts

from penstock.loadtest.models.make_model import make_tokenizer
from penstock.protocol.grammar.compiler import compile_grammar
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
from penstock.services.worker.gpu import shared_rows as rows_module
from penstock.services.worker.gpu.decoder import dense_executor
from penstock.services.worker.gpu.executor import GpuExecutor
from penstock.services.worker.layer_groups import group_layers
from penstock.services.worker.model_executor import ModelExecutor
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.models.dense import DenseConfig, caches_of, dense_config
from penstock.services.worker.models.dense_form import dense_model
from penstock.services.worker.slots import PlanError

pytestmark = pytest.mark.usefixtures("few_programs")
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
Folder = Callable[[str], Path]


def silent(note: str) -> None:
    pass


def gpu_executor(
    folder: Path, block_size: int = 16, dtype: torch.dtype = torch.float32
) -> GpuExecutor:
    info = read_model_info(folder)
    model = load_model(info, dtype, DEVICE, silent, longest=256)
    config = dense_config(model.specification)
    assert isinstance(config, DenseConfig), config
    groups = group_layers(caches_of(config)).groups
    capacity = EngineSizes(80, block_size, 8, 48, 256, info.vocab_size, groups=groups)
    return dense_executor(*dense_model(config, model.specification, model.weights), capacity)


def plain_executor(folder: Path) -> ModelExecutor:
    info = read_model_info(folder)
    capacity = EngineSizes(80, 16, 8, 48, 256, info.vocab_size)
    return ModelExecutor(load_model(info, torch.float32, torch.device("cpu"), silent), capacity)


@pytest.mark.parametrize(
    ("variant", "block_size"),
    [
        ("qwen3", 16),
        pytest.param("qwen2-wide", 32, marks=pytest.mark.slow),
        pytest.param("llama3-wide", 64, marks=pytest.mark.slow),
    ],
)
def test_the_gpu_executor_gives_the_tokens_of_transformers(
    variant: str, block_size: int, tiny_folder: Folder
) -> None:
    prompts = some_prompts([1, 35, 70] if ON_GPU else [1, 35 if block_size < 64 else 20])
    executor = gpu_executor(tiny_folder(variant), block_size)
    driver, count = PlanDriver(executor, 1), 4 if ON_GPU or variant != "qwen3" else 2
    assert driver.run(prompts, count, preemptions=1) == generated(variant, prompts, count)


GPU_FAMILIES = (
    "mistral", "gemma2", "gemma3", "phi3", "phi3-longrope", "granite", "granite-swa", "smollm3",
    "glm4",
)  # fmt: skip
IN_SHORT = ("gemma2",)
"""Windows, soft caps, norms on both sides and heads that are filled up, in one family."""


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=[] if ON_GPU or name in IN_SHORT else pytest.mark.slow)
        for name in GPU_FAMILIES
    ],
)
def test_families_give_the_tokens_of_transformers(variant: str, tiny_folder: Folder) -> None:
    prompts = some_prompts([1, 35, 150] if ON_GPU else [1, 60])
    executor = gpu_executor(tiny_folder(variant))
    driver, count = PlanDriver(executor, 1), 4 if ON_GPU or variant not in IN_SHORT else 2
    assert driver.run(prompts, count, preemptions=1) == generated(variant, prompts, count)


def test_steps_that_are_padded_to_the_size_of_a_graph_give_the_same_tokens(
    tiny_folder: Folder,
) -> None:
    prompts = some_prompts([1, 12, 5])
    executor = gpu_executor(tiny_folder("qwen3"))
    executor.graphs.make(lambda work: Repeated(executor.chunks, work), 8)
    assert PlanDriver(executor, 6).run(prompts[2:], 2) == generated("qwen3", prompts[2:], 2)
    samplings = [GREEDY, SlotSampling(1.0, 20, 1.0, 11), SlotSampling(0.9, 0, 0.8, 12)]
    wanted = PlanDriver(plain_executor(tiny_folder("qwen3")), 2).run(
        prompts, 2, samplings=samplings
    )
    assert wanted[:1] == generated("qwen3", prompts[:1], 2)
    executor.reset()
    assert PlanDriver(executor, 6).run(prompts, 2, samplings=samplings) == wanted


def test_the_gpu_executor_draws_what_the_plain_one_draws(tiny_folder: Folder) -> None:
    """Greedy, plain, top-k and top-p rows in one batch."""
    prompts = some_prompts([3, 9, 2, 5, 4])
    samplings = [
        GREEDY,
        SlotSampling(0.8, 0, 1.0, 7),
        SlotSampling(1.3, 0, 1.0, (1 << 64) - 3),
        SlotSampling(1.0, 20, 1.0, 11),
        SlotSampling(0.9, 0, 0.8, 12),
    ]
    folder = tiny_folder("qwen3")
    wanted = PlanDriver(plain_executor(folder), 2).run(prompts, 2, samplings=samplings)
    assert PlanDriver(gpu_executor(folder), 3).run(prompts, 2, samplings=samplings) == wanted


@pytest.mark.slow
def test_adjustments_give_the_tokens_of_the_plain_executor(tiny_folder: Folder) -> None:
    """Also where a sequence lost its slot; end tokens and bad words stand in the last rows."""
    folder, prompts = tiny_folder("qwen3"), some_prompts([3, 12, 7, 5, 9, 4, 6, 8])
    (plain,) = PlanDriver(plain_executor(folder), 2).run(prompts[6:7], 4)
    samplings = [
        *EVERY_KIND,
        asking(bad_words=[ids(*plain[1:3]), ids(plain[0])]),
        asking(
            min_tokens=3, ends=ids(*range(7), *range(8, 200)), banned=ids(7, 200, 201),
            banned_until=2, **biased(t9=2.0),
        ),
    ]  # fmt: skip
    wanted = PlanDriver(plain_executor(folder), 2).run(prompts, 5, samplings=samplings)
    driver = PlanDriver(gpu_executor(folder), 3)
    assert driver.run(prompts, 5, samplings=samplings, preemptions=2) == wanted


def prefill(slot: int, tokens: list[int], blocks: list[int], step: int, full: bool) -> StepPlan:
    ids = torch.tensor(tokens, dtype=torch.int32).numpy().tobytes()
    new = NewSlot(slot, ids, len(tokens), 0, blocks, GREEDY.packed())
    chunk = Chunk(slot, 0, len(tokens), True, [])
    return StepPlan(1, step, full, [], [new], [], [chunk])


def test_steps_may_be_launched_before_earlier_ones_are_collected(tiny_folder: Folder) -> None:
    folder = tiny_folder("qwen3")
    (prompt,) = some_prompts([10])
    (wanted,) = generated("qwen3", [prompt], 3)
    executor = gpu_executor(folder)
    executor.launch(prefill(2, prompt, [3], 1, True))
    for step in (2, 3):
        executor.launch(StepPlan(1, step, False, [], [], [], []))
    assert executor.in_flight == 3
    found = []
    for step in (1, 2, 3):
        result = executor.finished(wait=True)
        assert result is not None
        assert (result.step, result.bad_rows) == (step, [])
        found += torch.frombuffer(bytearray(result.tokens), dtype=torch.int32).tolist()
    assert found == wanted
    assert executor.finished() is None


def test_a_wrong_plan_drops_the_slots_and_keeps_the_steps_under_way(tiny_folder: Folder) -> None:
    executor = gpu_executor(tiny_folder("qwen3"))
    executor.launch(prefill(0, [1, 2, 3], [0], 1, True))
    with pytest.raises(PlanError, match="slot 5"):
        executor.launch(StepPlan(1, 2, False, [5], [], [], []))
    with pytest.raises(PlanError, match="full plan"):
        executor.launch(StepPlan(1, 3, False, [], [], [], []))
    result = executor.finished(wait=True)
    assert result is not None
    assert result.step == 1
    executor.launch(prefill(0, [1, 2, 3], [0], 4, True))
    again = executor.finished(wait=True)
    assert again is not None
    assert again.tokens == result.tokens


def test_a_row_that_is_not_finite_is_named_and_costs_its_neighbours_nothing(
    tiny_folder: Folder,
) -> None:
    folder = tiny_folder("llama3-wide")
    prompts = some_prompts([4, 6])
    wanted = generated("llama3-wide", prompts, 1)
    executor = gpu_executor(folder)
    executor.decoder.weights.embedding[299] = float("nan")
    prompts.append([5, 299, 7])
    added, chunks = [], []
    for slot, prompt in enumerate(prompts):
        ids = torch.tensor(prompt, dtype=torch.int32).numpy().tobytes()
        added.append(NewSlot(slot, ids, len(prompt), 0, [slot], GREEDY.packed()))
        chunks.append(Chunk(slot, 0, len(prompt), True, []))
    result = executor.execute(StepPlan(1, 1, True, [], added, [], chunks))
    assert result.bad_rows == [2]
    tokens = torch.frombuffer(bytearray(result.tokens), dtype=torch.int32).tolist()
    assert [[token] for token in tokens[:2]] == wanted


def test_the_warm_up_reads_nothing_that_a_host_buffer_held_before(tiny_folder: Folder) -> None:
    executor = gpu_executor(tiny_folder("qwen3"))
    with torch.inference_mode():
        # Weights, in memory that is used again.
        executor.chunks._device.fill_(0x3C003C00)
        executor.graphs.run_padding(8)
    assert executor.chunks.slots.eq(-1).all()
    assert not executor.decoder.attention.pool.blocks.any()


@pytest.mark.slow
def test_a_block_that_is_copied_elsewhere_gives_the_same_tokens(tiny_folder: Folder) -> None:
    """In one piece, all layers and groups of it; where it was before there is nothing."""
    for variant in ("qwen3", "gemma3"):
        folder, (prompt,) = tiny_folder(variant), some_prompts([22])
        executor = gpu_executor(folder)
        groups = max(1, len(executor.capacity.groups))
        before, after = list(range(2 * groups)), list(range(30, 30 + 2 * groups))
        new = NewSlot(0, ids(*prompt), 22, 0, before, GREEDY.packed())
        first = executor.execute(StepPlan(1, 1, True, [], [new], [], [Chunk(0, 0, 22, True, [])]))
        blocks = executor.decoder.attention.pool.blocks
        with torch.inference_mode():
            for here, there in zip(before[:groups], after[:groups], strict=True):
                kept = blocks[here].clone()
                assert blocks[here].is_contiguous()
                blocks[here].fill_(torch.nan)
                blocks[there].copy_(kept)
        again = NewSlot(1, ids(*prompt), 22, 16, after[:groups], GREEDY.packed())
        chunk = Chunk(1, 16, 6, True, after[groups:])
        second = executor.execute(StepPlan(1, 2, False, [0], [again], [], [chunk]))
        assert second.tokens == first.tokens
        (wanted,) = generated(variant, [prompt], 1)
        assert np.frombuffer(second.tokens, "<i4").tolist() == wanted


def decoding_after(
    executor: GpuExecutor, prefix: list[int], own: list[list[int]], steps: int
) -> list[list[int]]:
    """Outputs of sequences whose first blocks are the same, one prefilled after the other."""
    size = executor.capacity.block_size
    shared = list(range(len(prefix) // size))
    free, step, outputs = len(shared), 0, []
    for slot, tail in enumerate(own):
        tokens = prefix + tail
        count = -(-(len(tokens) + steps) // size) - len(shared)
        blocks = [*shared, *range(free, free + count)]
        free += count
        start = len(prefix) if slot else 0
        ids = torch.tensor(tokens, dtype=torch.int32).numpy().tobytes()
        new = NewSlot(slot, ids, len(tokens), start, blocks, GREEDY.packed())
        chunk = Chunk(slot, start, len(tokens) - start, True, [])
        step += 1
        result = executor.execute(StepPlan(1, step, step == 1, [], [new], [], [chunk]))
        for output, token in zip(outputs, tokens_of(result.tokens), strict=False):
            output.append(token)
        outputs.append([tokens_of(result.tokens)[-1]])
    while min(map(len, outputs)) < steps:
        step += 1
        result = executor.execute(StepPlan(1, step, False, [], [], [], []))
        for output, token in zip(outputs, tokens_of(result.tokens), strict=True):
            output.append(token)
    return [output[:steps] for output in outputs]


def tokens_of(packed: bytes) -> list[int]:
    return torch.frombuffer(bytearray(packed), dtype=torch.int32).tolist()


@pytest.mark.slow
def test_rows_of_more_heads_than_the_kernel_of_shared_prefixes_takes_do_without_it(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "LEAST_ROWS", 2)
    monkeypatch.setattr(rows_module, "LEAST_SAVED", 16)
    prefix, *own = some_prompts([16, 3, 1])
    wanted = generated("llama-many-heads", [prefix + tail for tail in own], 2)
    executor = gpu_executor(tiny_folder("llama-many-heads"))
    assert "up to 64 heads for a KV head, not 66" in executor.summary
    assert decoding_after(executor, prefix, own, 2) == wanted
    assert not executor.shares_a_prefix


@pytest.mark.slow
def test_rows_that_share_a_prefix_give_the_tokens_of_rows_that_do_not(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, *own = some_prompts([32, 3, 1, 9])
    wanted = generated("qwen3", [prefix + tail for tail in own], 4)
    executor = gpu_executor(tiny_folder("qwen3"))
    assert decoding_after(executor, prefix, own, 4) == wanted
    assert not executor.shares_a_prefix, "too few rows for a pass of its own"
    monkeypatch.setattr(rows_module, "LEAST_ROWS", 2)
    monkeypatch.setattr(rows_module, "LEAST_SAVED", 32)
    executor.reset()
    assert decoding_after(executor, prefix, own, 4) == wanted
    assert executor.shares_a_prefix


@pytest.mark.slow
def test_logprobs_are_those_of_transformers(tiny_folder: Folder) -> None:
    folder = tiny_folder("qwen3")
    check_outputs(PlanDriver(gpu_executor(folder), 2), folder, some_prompts([3, 5, 9, 2]), 2)


def test_logprobs_of_prompts_in_chunks_are_those_of_transformers(tiny_folder: Folder) -> None:
    folder = tiny_folder("qwen3")
    check_prompts(PlanDriver(gpu_executor(folder), 3), folder, some_prompts([6, 4, 2]))


GRAMMARS = [
    Grammar("regex", "(ab|[0-9]{3})+"),
    Grammar("json_object"),
    Grammar("choice", '["Yes","No","perhaps"]'),
]


def follow_grammars(folder: Path, make: Callable[[Path], Any]) -> list[list[int]]:
    """Outputs of greedy and drawn rows with grammars, and of one without, with preemptions."""
    samplings = [
        SlotSampling(0.9 * (place % 2), 0, 1.0, 3 + place, 0.0, SlotAdjustments(grammar=grammar))
        for place, grammar in enumerate(GRAMMARS)
    ]
    executor = make(folder)
    vocab_size = executor.capacity.vocab_size
    executor.grammars.serve(
        lambda: make_vocabulary(make_tokenizer(vocab_size).to_str(), vocab_size, [2]), patience=20.0
    )
    driver = PlanDriver(executor, 4)
    return driver.run(some_prompts([5, 9, 12, 7]), 4, samplings=[*samplings, GREEDY], preemptions=2)


@pytest.mark.slow
def test_grammars_give_the_tokens_of_the_plain_executor(tiny_folder: Folder) -> None:
    folder = tiny_folder("qwen3")
    found = follow_grammars(folder, gpu_executor)
    assert found == follow_grammars(folder, plain_executor)
    vocabulary = make_vocabulary(make_tokenizer(307).to_str(), 307, [2])
    for grammar, output in zip(GRAMMARS, found, strict=False):
        matcher = compile_grammar(grammar, vocabulary)
        fitting = output[: output.index(2) + 1] if 2 in output else output
        assert matcher.validate_tokens(fitting) == len(fitting)
    plain = PlanDriver(plain_executor(folder), 4).run(some_prompts([5, 9, 12, 7]), 4)
    assert found[3] == plain[3]
