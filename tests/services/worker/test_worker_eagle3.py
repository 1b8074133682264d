"""Drafts of an EAGLE-3 head: computed as published, kept with the blocks, and never in the text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.worker.oracle_drafts import AllDrafts
from support.worker.plan_driver import GREEDY, PlanDriver
from support.worker.plan_driver import Sequence as Planned
from support.worker.tiny_heads import DIM, KV_HEADS, PlainHead, tensors_of, write_head
from support.worker.tiny_models import make_model, some_prompts
from test_worker_drafting_executor import ADJUSTED
from test_worker_model_executor import executor_for

from penstock.protocol.model_info import BadModelFolder, read_model_info
from penstock.protocol.wire.messages.steps import Chunk, NewSlot, SlotSampling, StepPlan
from penstock.services.worker.drafting_executor import DraftingExecutor
from penstock.services.worker.models.eagle3 import read_eagle3
from penstock.services.worker.models.eagle3_head import load_eagle3
from penstock.services.worker.speculation.eagle3_drafter import Eagle3Drafter
from penstock.services.worker.speculation.model_drafting import (
    CAPITAL_SECONDS,
    GRANTED_SHARE,
    Ledger,
    ModelDrafting,
)

Folder = Callable[[str], Path]


def drafter_of(executor: DraftingExecutor, target: Path, head: Path) -> Eagle3Drafter:
    model: Any = executor._model
    found = load_eagle3(*read_eagle3(str(head), read_model_info(target)), model.weights.embedding)
    return Eagle3Drafter(found, model, executor.slots)


def drafting_by(executor: DraftingExecutor, drafter: Any, most: int = 4) -> DraftingExecutor:
    """Drafts whatever that costs."""
    drafting = ModelDrafting(drafter, most, AllDrafts(64))
    drafting.ledger.add = lambda seconds, saved: None  # type: ignore[method-assign]
    executor.speculate(drafting)
    return executor


@pytest.fixture(scope="module")
def head_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), tensors_of())


class KeepingDriver(PlanDriver):
    """Also keeps what lies in the head's memory for each sequence that ends."""

    def __init__(self, executor: DraftingExecutor, drafter: Eagle3Drafter, seed: int) -> None:
        super().__init__(executor, seed)
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._drafter = drafter

    def _drop(self, sequence: Planned) -> int:
        blocks = torch.tensor(sequence.tables[0])
        parts = [
            each[:, blocks].flatten(1, 2)[:, : sequence.computed].clone()
            for each in self._drafter._memory.layers[0]
        ]
        self.kept[sequence.name] = parts[0], parts[1]
        return super()._drop(sequence)


SAMPLINGS = [
    GREEDY,
    SlotSampling(0.9, 20, 0.9, 6, logprobs=2),
    SlotSampling(0.0, 0, 1.0, 7, adjustments=ADJUSTED["penalties"], logprobs=1),
    SlotSampling(1.0, 0, 1.0, 5, adjustments=ADJUSTED["min tokens"]),
]


def test_a_head_changes_no_text_and_keeps_what_it_would_compute_of_each(
    tiny_folder: Folder, head_folder: Path
) -> None:
    folder, prompts = tiny_folder("llama"), some_prompts([5, 33, 129, 64])
    plain = PlanDriver(executor_for(folder, kind=DraftingExecutor), 1)
    expected = plain.run(prompts, 24, samplings=SAMPLINGS, chunk=50)
    executor = executor_for(folder, kind=DraftingExecutor)
    drafter = drafter_of(executor, folder, head_folder)
    drafting_by(executor, drafter)
    driver = KeepingDriver(executor, drafter, 2)
    got = driver.run(prompts, 24, samplings=SAMPLINGS, preemptions=3)
    assert got == expected
    assert driver.logprobs == plain.logprobs
    assert sum(executor.drafting.counts.drafted["eagle3"]) > 100
    head = PlainHead(tensors_of(), make_model("llama"))
    for number, (keys, values) in driver.kept.items():
        text = (prompts[number] + got[number])[: keys.shape[1]]
        wanted = head.keys_values(text, head.features(text[:-1]))
        torch.testing.assert_close(keys[:, 1:], wanted[0], atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(values[:, 1:], wanted[1], atol=2e-4, rtol=1e-3)


def one_slot(tokens: list[int], computed: int, blocks: list[int], step: int) -> StepPlan:
    new = NewSlot(
        0, np.array(tokens, "<i4").tobytes(), len(tokens), computed, blocks, GREEDY.packed(),
        most=len(tokens) + 20, corpus=b"corpus",
    )  # fmt: skip
    chunk = Chunk(0, computed, len(tokens) - computed, True, [])
    return StepPlan(1, step, step == 1, [] if step == 1 else [0], [new], [], [chunk])


@pytest.mark.parametrize("draft_vocab", [100, 307])
def test_drafts_are_those_of_the_published_head(
    draft_vocab: int, tiny_folder: Folder, tmp_path: Path
) -> None:
    tensors, folder = tensors_of(draft_vocab), tiny_folder("llama")
    if draft_vocab == 307:
        del tensors["d2t"], tensors["t2d"]
    executor = executor_for(folder, kind=DraftingExecutor)
    drafter = drafter_of(executor, folder, write_head(tmp_path / "head", tensors))
    drafting_by(executor, drafter)
    (prompt,) = some_prompts([37])
    result = executor.execute(one_slot(prompt, 0, list(range(8)), 1))
    text = [*prompt, *np.frombuffer(result.tokens, "<i4").tolist()]
    with torch.inference_mode():
        ((*found,),) = drafter.draft(np.array([0]), np.array([5]))
    tensors.setdefault("d2t", torch.zeros(307, dtype=torch.int64))
    assert found == PlainHead(tensors, make_model("llama")).drafts(text, 5)


def test_a_cached_prefix_is_good_for_the_head_too(tiny_folder: Folder, head_folder: Path) -> None:
    """But for the one position whose features nobody has any more."""
    folder = tiny_folder("llama")
    executor = executor_for(folder, kind=DraftingExecutor)
    drafter = drafter_of(executor, folder, head_folder)
    drafting_by(executor, drafter)
    (prompt,) = some_prompts([30])
    executor.execute(one_slot(prompt, 0, [5, 6, 7, 8], 1))
    executor.execute(one_slot(prompt, 16, [5, 6, 9, 10], 2))
    for cache in drafter._memory.layers[0]:
        first, second = (
            cache[:, [*blocks]].view(KV_HEADS, 16, DIM) for blocks in ((7, 8), (9, 10))
        )
        assert not torch.equal(first[:, 0], second[:, 0])
        torch.testing.assert_close(first[:, 1:14], second[:, 1:14])
        assert not second[:, 14:].any()


def test_nothing_of_a_rejected_draft_is_left(tiny_folder: Folder, head_folder: Path) -> None:
    folder = tiny_folder("llama")
    executor = executor_for(folder, kind=DraftingExecutor)
    drafter = drafter_of(executor, folder, head_folder)
    drafting_by(executor, drafter)
    (prompt,) = some_prompts([30])
    executor.execute(one_slot(prompt, 0, [5, 6, 7, 8, 9], 1))
    written = 30
    for step in range(2, 6):
        result = executor.execute(StepPlan(1, step, False, [], [], [], []))
        written += result.counts[0]
        assert result.drafted[0] == 4
        for cache in drafter._memory.layers[0]:
            kept = cache[:, 5:10].flatten(1, 2)
            assert kept[:, 1:written].any(-1).all()
            assert not kept[:, written:].any()


def test_while_drafts_rest_nothing_is_kept(tiny_folder: Folder, head_folder: Path) -> None:
    folder, prompts = tiny_folder("llama"), some_prompts([20, 9])
    expected = PlanDriver(executor_for(folder), 1).run(prompts, 12)
    executor = executor_for(folder, kind=DraftingExecutor)
    drafter = drafter_of(executor, folder, head_folder)
    executor.speculate(ModelDrafting(drafter, 4, AllDrafts(64)))
    executor.drafting.ledger.add(0.0, -2 * CAPITAL_SECONDS)
    drafter.rests = True
    assert PlanDriver(executor, 1).run(prompts, 12) == expected
    assert "eagle3" not in executor.drafting.counts.drafted
    assert not drafter._memory.layers[0][0].any()


def test_drafts_rest_once_they_have_lost_their_capital_and_begin_again() -> None:
    ledger = Ledger()
    for _ in range(1000):
        ledger.add(0.01, -0.01)
        if ledger.rests:
            break
    assert ledger.rests
    rested = 0.0
    while ledger.rests:
        ledger.add(0.1, 0.0)
        rested += 0.1
    assert rested * GRANTED_SHARE > CAPITAL_SECONDS / 2 - 0.01
    ledger.add(1.0, 100.0)
    ledger.add(0.0, -1.5 * CAPITAL_SECONDS)
    assert ledger.rests  # no gain of long ago pays for it


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"architectures": ["MedusaModel"]}, "MedusaModel.*LlamaForCausalLMEagle3"),
        ({"vocab_size": 308}, "vocab_size 308.*307"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, r"\[0, 1, 2\].*2"),
        ({"eagle_aux_hidden_state_layer_ids": None}, r"\[2, 1, -1\]"),
        ({"target_hidden_size": 65}, "target_hidden_size 65.*64"),
        ({"draft_vocab_size": 99}, "lm_head.weight.*100"),
        ({"intermediate_size": 100}, "of a wrong shape"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_name(
    settings: dict[str, Any], words: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    folder = write_head(tmp_path / "head", tensors_of(), **settings)
    with pytest.raises(BadModelFolder, match=words):
        read_eagle3(str(folder), read_model_info(tiny_folder("llama")))


def test_tokens_beyond_the_vocabulary_are_refused(tiny_folder: Folder, tmp_path: Path) -> None:
    tensors, folder = tensors_of(), tiny_folder("llama")
    tensors["d2t"][-1] = 307
    executor = executor_for(folder, kind=DraftingExecutor)
    with pytest.raises(BadModelFolder, match=r"d2t.*307"):
        drafter_of(executor, folder, write_head(tmp_path / "head", tensors))
