"""Text of the executor for GPUs is the same with drafts and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from support.pipeline.adapter_folders import write_adapter
from support.worker.ahead_driver import AheadDriver, make_late
from support.worker.asked_slots import asking, biased, ids
from support.worker.oracle_drafts import AllDrafts, OracleProposer, speculating
from support.worker.plan_driver import GREEDY, PlanDriver
from support.worker.scheduled_executor import new_core, scheduled, work
from support.worker.tiny_adapters import modules_of
from support.worker.tiny_models import make_model, some_prompts
from test_worker_adapters_gpu import gpu_executor as with_adapters
from test_worker_gpu_executor import DEVICE, gpu_executor, silent

from penstock.loadtest.models.make_model import make_tokenizer
from penstock.protocol.grammar.compiler import make_tokenizer as make_vocabulary
from penstock.protocol.grammar.request import Grammar
from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.requests import TokenWork
from penstock.protocol.wire.messages.steps import (
    Chunk,
    NewSlot,
    SlotAdjustments,
    SlotSampling,
    StepPlan,
)
from penstock.services.worker.gpu.decoder import GpuDecoder, dense_executor
from penstock.services.worker.gpu.drafting_executor import DraftingGpuExecutor
from penstock.services.worker.gpu.executor import GpuExecutor
from penstock.services.worker.gpu.in_flight import InFlight
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.models.dense import DenseConfig, dense_config
from penstock.services.worker.models.dense_form import dense_model
from penstock.services.worker.speculation.drafting import Drafting
from penstock.services.worker.speculation.proposer import GRAMMAR, OWN, Draft

pytestmark = pytest.mark.usefixtures("few_programs")
ON_GPU = torch.cuda.is_available()
SLOW_WITHOUT_GPU = pytest.mark.gpu if ON_GPU else pytest.mark.slow
Folder = Callable[[str], Path]
SAMPLINGS = [
    GREEDY,
    SlotSampling(1.0, 0, 1.0, 5),
    SlotSampling(0.8, 7, 0.9, 6),
    SlotSampling(1.3, 0, 0.7, 7, min_p=0.05),
    SlotSampling(0.9, 9, 1.0, 8, logprobs=2),
    asking(0.9, frequency=0.7, **biased(t7=2.0)),
]


def with_and_without(
    folder: Path, samplings: list[SlotSampling], lengths: list[int], tokens: int, wrong: float = 0.3
) -> PlanDriver:
    """Compares the outputs of prompts, and their logprobs; returns the driver with drafts."""
    prompts = some_prompts(lengths)
    executor = gpu_executor(folder)
    plain = PlanDriver(executor, 1)
    expected = plain.run(prompts, tokens, samplings=samplings)
    executor.reset()
    speculating(executor, list(zip(prompts, expected, strict=True)), wrong)
    driver = PlanDriver(executor, 2)
    got = driver.run(prompts, tokens, samplings=samplings, preemptions=1)
    assert got == expected
    assert driver.logprobs.keys() == plain.logprobs.keys()
    for place, found in driver.logprobs.items():
        entries = [np.frombuffer(one.entries, "<i4") for one in (found, plain.logprobs[place])]
        logprobs = [2, *range(len(entries[0]) - found.most, len(entries[0]))]
        got_words, words = (np.delete(one, logprobs).tolist() for one in entries)
        assert got_words == words, "tokens and ranks"
        values = [one[logprobs].view("<f4") for one in entries]
        np.testing.assert_allclose(*values, atol=1e-3)
    assert max(driver.row_counts) > 1
    return driver


@SLOW_WITHOUT_GPU
def test_drafts_change_no_draw(tiny_folder: Folder) -> None:
    lengths = [1, 33, 5, 12, 7, 9]
    driver = with_and_without(tiny_folder("qwen3"), SAMPLINGS, lengths, 24 if ON_GPU else 6)
    assert len(driver.logprobs) == (24 if ON_GPU else 6)


@SLOW_WITHOUT_GPU
def test_drafts_bring_the_logprobs_of_each_token(tiny_folder: Folder) -> None:
    samplings, tokens = [SlotSampling(0.9, 9, 1.0, 8, logprobs=2), SAMPLINGS[4]], 12
    driver = with_and_without(tiny_folder("qwen3"), samplings, [7, 9], tokens, wrong=0.0)
    assert len(driver.logprobs) == 2 * tokens and max(driver.row_counts) > 2


@SLOW_WITHOUT_GPU
@pytest.mark.parametrize("variant", ["gemma2", "llama3-wide", "mistral", "phi3"])
def test_drafts_change_no_greedy_token(variant: str, tiny_folder: Folder) -> None:
    with_and_without(tiny_folder(variant), [GREEDY] * 2, [1, 60], 16 if ON_GPU else 6)


@SLOW_WITHOUT_GPU
def test_rejected_drafts_are_counted_by_their_place(tiny_folder: Folder) -> None:
    prompts, tokens = some_prompts([20]), 9
    executor = gpu_executor(tiny_folder("qwen3"))
    expected = PlanDriver(executor, 1).run(prompts, tokens)
    for wrong in (0.0, 1.0):
        executor.reset()
        drafting = Drafting(OracleProposer([(prompts[0], expected[0])], wrong), 3, AllDrafts(8))
        executor.speculate(drafting)
        assert PlanDriver(executor, 2).run(prompts, tokens) == expected
        drafted, taken = drafting.counts.drafted["own"], drafting.counts.accepted["own"]
        assert drafted[0] >= drafted[1] > 0
        assert taken == ([0, 0, 0] if wrong else drafted)


@SLOW_WITHOUT_GPU
def test_rows_of_adapters_have_drafts_beside_others(tiny_folder: Folder, tmp_path: Path) -> None:
    modules = modules_of(make_model("qwen3"))
    folders = {
        name: write_adapter(tmp_path / name, modules, seed=seed)
        for seed, name in enumerate(("one", "two"))
    }
    executor, held = with_adapters(tiny_folder("qwen3"), **folders)
    assert isinstance(executor, DraftingGpuExecutor)
    prompts, adapters, tokens = 3 * some_prompts([9]), ["", *held.numbers], 16 if ON_GPU else 6
    expected = PlanDriver(executor, 1).run(prompts, tokens, adapters=adapters)
    assert len({tuple(one) for one in expected}) == 3
    executor.reset()
    speculating(executor, list(zip(prompts, expected, strict=True)))
    driver = PlanDriver(executor, 2)
    assert driver.run(prompts, tokens, adapters=adapters, preemptions=1) == expected
    assert max(driver.row_counts) > 1


@SLOW_WITHOUT_GPU
def test_drafts_read_keys_and_values_of_a_byte_a_number(tiny_folder: Folder) -> None:
    """A row attends to what is stored, whether it is drafted or not."""
    info = read_model_info(tiny_folder("qwen3"))
    model = load_model(info, torch.float32, DEVICE, silent, longest=256)
    config = dense_config(model.specification)
    assert isinstance(config, DenseConfig)
    sizes = EngineSizes(80, 16, 8, 48, 256, info.vocab_size)
    dense = dense_model(config, model.specification, model.weights)
    executor = dense_executor(*dense, sizes, None, "int8")
    prompts, tokens = some_prompts([20, 33]), 16 if ON_GPU else 6
    expected = PlanDriver(executor, 1).run(prompts, tokens)
    executor.reset()
    speculating(executor, list(zip(prompts, expected, strict=True)))
    driver = PlanDriver(executor, 2)
    assert driver.run(prompts, tokens, preemptions=1) == expected
    assert max(driver.row_counts) > 1


GRAMMARS = [
    Grammar("regex", "(item one and item two, ){2}(done|finished)"),
    Grammar("regex", "(ab|[0-9]{3})+"),
    Grammar("json_object"),
]


def with_grammars(executor: GpuExecutor, *more: SlotSampling) -> list[SlotSampling]:
    """Samplings of rows with grammars, greedy, drawn and from limits, of one that also has biases
    and no end for a while, and of ``more``."""
    vocab_size = executor.capacity.vocab_size
    executor.grammars.serve(
        lambda: make_vocabulary(make_tokenizer(vocab_size).to_str(), vocab_size, [2]), patience=20.0
    )
    ends = np.array([2], "<i4").tobytes()
    limits = [(0.0, 0, 1.0), (0.9, 0, 1.0), (1.1, 9, 0.9)]
    rows = [
        SlotSampling(*limit, 3 + place, 0.0, SlotAdjustments(grammar=grammar))
        for place, (grammar, limit) in enumerate(zip(GRAMMARS, limits, strict=True))
    ]
    asked = SlotAdjustments(grammar=GRAMMARS[1], min_tokens=9, ends=ends)
    rows.append(SlotSampling(0.7, 0, 1.0, 11, 0.0, asked))
    return [*rows, *more]


@SLOW_WITHOUT_GPU
@pytest.mark.parametrize("late", [False, True])
def test_rows_with_grammars_and_biases_have_drafts_and_the_same_text(
    late: bool, tiny_folder: Folder
) -> None:
    executor = gpu_executor(tiny_folder("qwen3"))
    asked = biased(t7=2.0), {"allowed": ids(*range(0, 300, 7)), "banned": ids(7), "banned_until": 5}
    samplings = with_grammars(executor, *(asking(0.9, **one) for one in asked))
    prompts, tokens = some_prompts([5, 9, 12, 7, 3, 6]), 20 if ON_GPU else 12
    if late:
        make_late(executor)
    expected = AheadDriver(executor).run(prompts, tokens, samplings)
    executor.reset()
    speculating(executor, list(zip(prompts, expected, strict=True)), 0.3)
    assert executor.drafting is not None
    counts = executor.drafting.counts
    for preempted in (0.0, 0.15):
        driver = AheadDriver(executor)
        assert driver.run(prompts, tokens, samplings, preempted) == expected
        assert max(driver.row_counts) > 1
        executor.reset()
    assert sum(counts.accepted[GRAMMAR]) > 0 < sum(counts.accepted[OWN])


@SLOW_WITHOUT_GPU
def test_rows_with_penalties_have_drafts_and_the_same_text(tiny_folder: Folder) -> None:
    executor = gpu_executor(tiny_folder("qwen3"))
    few = ids(5, 9, 11, 30)  # so that what was said before decides
    samplings = [
        asking(repetition=1.6, frequency=0.6, presence=0.4, allowed=few),
        asking(0.9, frequency=1.5, allowed=few),
        asking(0.7, repetition=0.6, min_p=0.05),
        SlotSampling(0.9, 9, 1.0, 8),
    ]
    prompts, tokens = some_prompts([5, 9, 12, 7]), 24 if ON_GPU else 12
    expected = AheadDriver(executor).run(prompts, tokens, samplings)
    for wrong in (0.0, 0.3):
        executor.reset()
        speculating(executor, list(zip(prompts, expected, strict=True)), wrong)
        assert executor.drafting is not None
        accepted = executor.drafting.counts.accepted
        driver = AheadDriver(executor)
        assert driver.run(prompts, tokens, samplings, 0.1) == expected
        assert sum(accepted[OWN][2:]) > 0


@SLOW_WITHOUT_GPU
def test_rows_that_read_the_order_of_their_tokens_have_no_drafts(tiny_folder: Folder) -> None:
    executor = gpu_executor(tiny_folder("qwen3"))
    samplings = [asking(0.9, bad_words=[ids(3, 9)]), asking(0.9, no_repeat_ngram=3)]
    prompts, tokens = some_prompts([5, 9]), 8
    expected = AheadDriver(executor).run(prompts, tokens, samplings)
    executor.reset()
    speculating(executor, list(zip(prompts, expected, strict=True)), 0.0)
    assert executor.drafting is not None
    assert AheadDriver(executor).run(prompts, tokens, samplings) == expected
    assert not executor.drafting.counts.drafted


@SLOW_WITHOUT_GPU
def test_a_row_whose_answer_comes_to_its_grammar_later_has_no_drafts_before(
    tiny_folder: Folder,
) -> None:
    executor = gpu_executor(tiny_folder("qwen3"))
    with_grammars(executor)
    prompts, tokens = some_prompts([5, 9]), 14
    free = AheadDriver(executor).run(prompts, tokens, [GREEDY] * 2)
    executor.reset()
    begins = free[0][3].to_bytes(4, "little")
    later = Grammar(GRAMMARS[0].kind, source=GRAMMARS[0].source, start_after=begins)
    samplings = [SlotSampling(0.0, 0, 1.0, 0, 0.0, SlotAdjustments(grammar=later)), GREEDY]
    expected = AheadDriver(executor).run(prompts, tokens, samplings)
    assert expected[0][:4] == free[0][:4] and expected[0] != free[0]
    executor.reset()
    speculating(executor, list(zip(prompts, expected, strict=True)), 0.0)
    driver = AheadDriver(executor)
    assert driver.run(prompts, tokens, samplings) == expected
    assert executor.drafting is not None
    assert sum(executor.drafting.counts.accepted[GRAMMAR]) > 0


class PoisonedProposer(OracleProposer):
    """Puts one token that makes numbers infinite into each draft."""

    poison = 0

    def propose(self, slot: int, most: int) -> Draft | None:
        draft = super().propose(slot, most)
        if draft is None:
            return None
        return Draft([*draft.tokens[:2], self.poison, *draft.tokens[2:]][:most], OWN, 3)


@SLOW_WITHOUT_GPU
def test_a_rejected_draft_that_is_not_finite_harms_no_row(tiny_folder: Folder) -> None:
    prompts, tokens = some_prompts([20, 9, 7]), 16 if ON_GPU else 6
    samplings = [GREEDY, SlotSampling(1.0, 0, 1.0, 5), asking(0.9, frequency=1.5, presence=0.5)]
    executor = gpu_executor(tiny_folder("llama3-wide"))
    expected = PlanDriver(executor, 1).run(prompts, tokens, samplings=samplings)
    met = {token for text in prompts + expected for token in text}
    proposer = PoisonedProposer(list(zip(prompts, expected, strict=True)), 0.0)
    proposer.poison = next(token for token in range(300) if token not in met)
    assert isinstance(executor.decoder, GpuDecoder)
    executor.decoder.weights.embedding[proposer.poison] = np.nan
    executor.reset()
    executor.speculate(Drafting(proposer, 5, AllDrafts(8)))
    driver = PlanDriver(executor, 2)
    assert driver.run(prompts, tokens, samplings=samplings, preemptions=1) == expected
    assert not driver.bad


def launch_prompts(executor: DraftingGpuExecutor, prompts: list[list[int]], tokens: int) -> None:
    """Launch the first step, with blocks for all tokens."""
    size = executor.capacity.block_size
    blocks = -(-(max(map(len, prompts)) + tokens + 8) // size)
    added = [
        NewSlot(
            slot, np.array(prompt, "<i4").tobytes(), len(prompt), 0,
            list(range(slot * blocks, (slot + 1) * blocks)), SAMPLINGS[slot].packed(),
            most=len(prompt) + tokens, corpus=b"corpus",
        )
        for slot, prompt in enumerate(prompts)
    ]  # fmt: skip
    chunks = [Chunk(slot, 0, len(prompt), True, []) for slot, prompt in enumerate(prompts)]
    executor.launch(StepPlan(1, 1, True, [], added, [], chunks))


def launched_ahead(
    executor: DraftingGpuExecutor, prompts: list[list[int]], tokens: int
) -> list[list[int]]:
    """The outputs of steps of which each is launched before the one before it is collected."""
    outputs: list[list[int]] = [[] for _ in prompts]
    launch_prompts(executor, prompts, tokens)
    step = 1
    while any(len(output) < tokens for output in outputs):
        step += 1
        executor.launch(StepPlan(1, step, False, [], [], [], []))
        result = executor.finished(wait=True)
        assert result is not None and result.step == step - 1
        drawn = np.frombuffer(result.tokens, "<i4").tolist()
        for output, count in zip(outputs, result.counts or [1] * len(prompts), strict=True):
            output += [drawn.pop(0) for _ in range(count)]
        assert not drawn
    assert executor.finished(wait=True) is not None
    return outputs


def test_steps_that_are_launched_ahead_bring_the_same_text(tiny_folder: Folder) -> None:
    prompts, tokens = some_prompts([3, 9]), 24 if ON_GPU else 5
    executor = gpu_executor(tiny_folder("qwen3"))
    expected = [one[:tokens] for one in launched_ahead(executor, prompts, tokens)]
    executor.reset()
    drafting = speculating(executor, list(zip(prompts, expected, strict=True))).drafting
    launch_prompts(executor, prompts, tokens)
    executor.launch(StepPlan(1, 2, False, [], [], [], []))
    assert drafting is not None and executor._flight[-1].drafts is not None
    executor.reset()  # the scheduler has died: nobody hears of the step
    assert launched_ahead(executor, prompts, tokens) == expected
    assert sum(drafting.counts.accepted["own"]) > 0


@SLOW_WITHOUT_GPU
def test_prefixes_that_were_computed_with_drafts_are_cached_without_those_rejected(
    tiny_folder: Folder,
) -> None:
    """The scheduler's own core plans ahead; the second round begins with the text of the first."""
    prompts, tokens = some_prompts([20, 9, 17]), 40 if ON_GPU else 20
    executor = gpu_executor(tiny_folder("qwen3"))
    make_late(executor)
    core = new_core(executor)
    alone, _ = scheduled(executor, works_of(prompts, tokens, SAMPLINGS), core)
    longer = [prompt + alone.tokens[at][:-1] for at, prompt in enumerate(prompts)]
    again, _ = scheduled(executor, works_of(longer, 8, SAMPLINGS), core)
    executor.reset()
    texts = [prompt + alone.tokens[at] for at, prompt in enumerate(prompts)]
    texts += [prompt + again.tokens[at] for at, prompt in enumerate(longer)]
    speculating(executor, [(text[:1], text[1:]) for text in texts])
    core = new_core(executor)
    drafted, _ = scheduled(executor, works_of(prompts, tokens, SAMPLINGS), core)
    assert drafted.tokens == alone.tokens
    behind, counters = scheduled(executor, works_of(longer, 8, SAMPLINGS), core)
    assert behind.tokens == again.tokens
    assert counters.prefix_hit_tokens >= sum(len(one) // 16 * 16 - 16 for one in longer)
    counts = executor.draft_counts
    assert counts is not None
    assert sum(counts.drafted[OWN]) > sum(counts.accepted[OWN]) > 0


def works_of(
    prompts: list[list[int]], tokens: int, samplings: list[SlotSampling]
) -> list[TokenWork]:
    return [work(prompt, samplings[at], tokens) for at, prompt in enumerate(prompts)]


def gap_and_rounding(variant: str, text: list[int], one: int, other: int) -> tuple[float, float]:
    """How far apart the logits of two tokens behind a text are in float32, and the standard
    deviation of what bfloat16 adds to the difference of any two: that of one logit, times √2."""
    model = make_model(variant).eval()
    with torch.no_grad():
        exact = model.to(torch.float32)(torch.tensor([text])).logits[0, -1]
        rounded = model.to(torch.bfloat16)(torch.tensor([text])).logits[0, -1].float()
    deviation = (rounded - exact).square().mean().sqrt()
    return float(abs(exact[one] - exact[other])), float(deviation) * 2**0.5


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("variant", ["llama3-wide", "qwen2-wide"])
def test_in_bfloat16_texts_part_only_where_tokens_are_nearly_as_likely(
    variant: str, tiny_folder: Folder
) -> None:
    """Steps have graphs, and each is launched while the one before it runs."""
    prompts, tokens = some_prompts([20, 40, 9, 33]), 48
    executor = gpu_executor(tiny_folder(variant), dtype=torch.bfloat16)
    executor.warm_up()
    samplings = [GREEDY] * len(prompts)
    expected = AheadDriver(executor).run(prompts, tokens, samplings)
    executor.reset()
    speculating(executor, list(zip(prompts, expected, strict=True)))
    driver = AheadDriver(executor)
    got = driver.run(prompts, tokens, samplings)
    assert max(driver.row_counts) > 1
    for prompt, one, other in zip(prompts, got, expected, strict=True):
        at = next((at for at in range(tokens) if one[at] != other[at]), None)
        if at is not None:
            gap, rounding = gap_and_rounding(variant, prompt + one[:at], one[at], other[at])
            assert gap < 4 * rounding, (at, one[at], other[at])


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_launching_drafts_compiles_nothing_and_waits_for_nothing(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = some_prompts([1, 33, 5, 12])
    executor = gpu_executor(tiny_folder("qwen3"))
    executor.warm_up()
    samplings = SAMPLINGS[:4]
    expected = PlanDriver(executor, 1).run(prompts, 24, samplings=samplings)
    executor.reset()
    speculating(executor, list(zip(prompts, expected, strict=True)))
    compiled: list[object] = []
    launch, launches = executor._launch_drafts, []

    def watched(*arguments: Any) -> InFlight:
        torch.cuda.set_sync_debug_mode("error")
        try:
            launches.append(launch(*arguments))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return launches[-1]

    monkeypatch.setattr(executor, "_launch_drafts", watched)
    hook = "jit_post_compile_hook"
    monkeypatch.setattr(triton.knobs.runtime, hook, lambda **found: compiled.append(found))
    assert PlanDriver(executor, 2).run(prompts, 24, samplings=samplings) == expected
    assert launches and not compiled


@SLOW_WITHOUT_GPU
@pytest.mark.parametrize(("wrong", "preempted"), [(0.0, 0.0), (0.3, 0.15)])
def test_drafts_are_placed_behind_tokens_that_the_host_does_not_know(
    wrong: float, preempted: float, tiny_folder: Folder
) -> None:
    """Slots also go to others while steps with drafts of who sat there are under way."""
    prompts, tokens = some_prompts([1, 33, 5, 12, 7]), 14
    samplings = [*SAMPLINGS[:4], SAMPLINGS[5]]
    executor = gpu_executor(tiny_folder("qwen3"))
    make_late(executor)
    expected = AheadDriver(executor).run(prompts, tokens, samplings)
    executor.reset()
    speculating(executor, list(zip(prompts, expected, strict=True)), wrong)
    driver = AheadDriver(executor)
    assert driver.run(prompts, tokens, samplings, preempted) == expected
    assert driver.ahead > 0 and max(driver.row_counts) > 1
    assert preempted or not executor.slots.pending.any()
