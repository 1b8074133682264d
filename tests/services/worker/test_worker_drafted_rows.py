"""Rows with drafts beside what changes single rows: grammars, choices, adapters, numbers that are
not finite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.pipeline.adapter_folders import write_adapter
from support.worker.oracle_drafts import AllDrafts, OracleProposer, speculating
from support.worker.plan_driver import GREEDY, PlanDriver
from support.worker.tiny_adapters import adapted, modules_of
from support.worker.tiny_models import make_model, some_prompts
from test_worker_model_executor import executor_for

from penstock.loadtest.models.make_model import make_tokenizer
from penstock.protocol.grammar.compiler import make_tokenizer as make_vocabulary
from penstock.protocol.grammar.request import Grammar
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import SlotAdjustments, SlotSampling
from penstock.services.worker.drafting_executor import DraftingExecutor
from penstock.services.worker.layer_groups import group_layers
from penstock.services.worker.speculation.drafting import Drafting
from penstock.services.worker.speculation.proposer import OWN, Draft

Folder = Callable[[str], Path]
END_TOKEN = 2
GRAMMARS = [
    Grammar("regex", "(ab|[0-9]{3})+"),
    Grammar("choice", '["abcdefghijkl","abcdexyzuvwxyz"]'),
    Grammar("json_object"),
]


class Nothing:
    """Knows no text: all drafts are what grammars force."""

    def begin(self, slot: int, text: object, prompt_len: int, corpus: bytes) -> None: ...

    def next_step(self) -> None: ...

    def took(self, slot: int, tokens: object) -> None: ...

    def propose(self, slot: int, most: int) -> Draft | None:
        return None

    def forget(self, slot: int) -> None: ...

    def clear(self) -> None: ...


def following_grammars(folder: Path) -> DraftingExecutor:
    executor: DraftingExecutor = executor_for(folder, kind=DraftingExecutor)
    size = executor.capacity.vocab_size
    executor.grammars.serve(
        lambda: make_vocabulary(make_tokenizer(size).to_str(), size, [END_TOKEN]), patience=20.0
    )
    return executor


def up_to_end(outputs: list[list[int]]) -> list[list[int]]:
    return [one[: one.index(END_TOKEN) + 1] if END_TOKEN in one else one for one in outputs]


@pytest.mark.parametrize("source", ["own", "grammar"])
def test_grammars_allow_the_same_tokens_beside_drafts(source: str, tiny_folder: Folder) -> None:
    folder, prompts = tiny_folder("llama"), some_prompts([5, 9, 12, 7, 8])
    samplings = [
        SlotSampling(
            0.9 * (place % 2), 0, 1.0, 3 + place, 0.0, SlotAdjustments(grammar=grammar), logprobs=1
        )
        for place, grammar in enumerate(GRAMMARS)
    ]
    settings = {"samplings": [*samplings, samplings[1], GREEDY], "preemptions": 2}
    plain = PlanDriver(following_grammars(folder), 1)
    expected = plain.run(prompts, 12, **settings)  # type: ignore[arg-type]
    executor = following_grammars(folder)
    if source == "own":
        speculating(executor, list(zip(prompts, expected, strict=True)))
    else:
        executor.speculate(Drafting(Nothing(), 5, AllDrafts(64)))
    driver = PlanDriver(executor, 2)
    got = driver.run(prompts, 12, **settings)  # type: ignore[arg-type]
    assert up_to_end(got) == up_to_end(expected)
    ends = {place: len(one) for place, one in enumerate(up_to_end(expected))}
    for place, found in plain.logprobs.items():
        if place[1] < ends[place[0]]:
            assert driver.logprobs[place] == found
    assert executor.drafting is not None
    assert sum(executor.drafting.counts.accepted[source]) > 0


def test_choices_of_one_prompt_are_drawn_as_without_drafts(tiny_folder: Folder) -> None:
    folder, prompts = tiny_folder("llama"), 4 * some_prompts([20])
    settings = {"samplings": 4 * [SlotSampling(1.2, 0, 1.0, 7)], "choices": [0, 1, 2, 3]}
    plain = PlanDriver(executor_for(folder, kind=DraftingExecutor), 1)
    expected = plain.run(prompts, 16, **settings)  # type: ignore[arg-type]
    assert len({tuple(one) for one in expected}) == 4
    executor = speculating(
        executor_for(folder, kind=DraftingExecutor), list(zip(prompts, expected, strict=True))
    )
    driver = PlanDriver(executor, 2)
    assert driver.run(prompts, 16, **settings) == expected  # type: ignore[arg-type]
    assert max(driver.row_counts) > 2


def test_rows_of_adapters_have_drafts_beside_others(tiny_folder: Folder, tmp_path: Path) -> None:
    modules = modules_of(make_model("llama"))
    folders = {
        name: write_adapter(tmp_path / name, modules, seed=seed)
        for seed, name in enumerate(("one", "two"))
    }
    model = adapted(tiny_folder("llama"), **folders)
    assert model.adapters is not None
    groups = group_layers(model.caches).groups
    sizes = EngineSizes(200, 8, 8, 256, 256, model.vocab_size, groups=groups)
    prompts, adapters = 3 * some_prompts([20]), ["", *model.adapters.numbers]
    expected = PlanDriver(DraftingExecutor(model, sizes), 1).run(prompts, 16, adapters=adapters)
    assert len({tuple(one) for one in expected}) == 3
    executor = speculating(
        DraftingExecutor(model, sizes), list(zip(prompts, expected, strict=True))
    )
    driver = PlanDriver(executor, 2)
    assert driver.run(prompts, 16, adapters=adapters, preemptions=2) == expected
    assert max(driver.row_counts) > 1


class PoisonedProposer(OracleProposer):
    """Puts one token that makes numbers infinite into each draft."""

    poison = 0

    def propose(self, slot: int, most: int) -> Draft | None:
        draft = super().propose(slot, most)
        if draft is None:
            return None
        return Draft([*draft.tokens[:2], self.poison, *draft.tokens[2:]][:most], OWN, 3)


@pytest.mark.parametrize("asks", [False, True], ids=["plain", "with adjustments"])
def test_a_rejected_draft_that_is_not_finite_harms_no_row(asks: bool, tiny_folder: Folder) -> None:
    folder, prompts = tiny_folder("llama"), some_prompts([20, 9, 33])
    adjusted = SlotAdjustments(frequency=0.5)
    samplings = [GREEDY, SlotSampling(1.0, 0, 1.0, 5), GREEDY]
    if asks:
        samplings[2] = SlotSampling(0.0, 0, 1.0, 0, adjustments=adjusted)
    plain = PlanDriver(executor_for(folder, kind=DraftingExecutor), 1)
    expected = plain.run(prompts, 16, samplings=samplings)
    executor = executor_for(folder, kind=DraftingExecutor)
    met = {token for text in prompts + expected for token in text}
    proposer = PoisonedProposer(list(zip(prompts, expected, strict=True)), 0.0)
    proposer.poison = next(token for token in range(300) if token not in met)
    executor._model.weights.embedding[proposer.poison] = np.nan
    executor.speculate(Drafting(proposer, 5, AllDrafts(64)))
    driver = PlanDriver(executor, 2)
    assert driver.run(prompts, 16, samplings=samplings, preemptions=2) == expected
    assert not driver.bad


def test_a_row_that_is_not_finite_is_told_beside_rows_with_drafts(tiny_folder: Folder) -> None:
    folder, prompts = tiny_folder("llama"), some_prompts([20, 9])
    prompts[1][-1] = 306
    executor = executor_for(folder, kind=DraftingExecutor)
    executor._model.weights.embedding[306] = np.nan
    plain = PlanDriver(executor, 1)
    expected = plain.run(prompts, 12)
    assert plain.bad == {1}
    executor = executor_for(folder, kind=DraftingExecutor)
    executor._model.weights.embedding[306] = np.nan
    speculating(executor, list(zip(prompts, expected, strict=True)))
    driver = PlanDriver(executor, 2)
    assert driver.run(prompts, 12)[0] == expected[0]
    assert driver.bad == {1}
