"""The draft head of the built-in model: what was trained is served, and its drafts are right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import penstock.demo
from penstock.demo.chat import prompt_text
from penstock.demo.grading import questions
from penstock.demo.training.draft_head import passes_of, read, target_rows
from penstock.demo.training.generate import load
from penstock.demo.training.model import dense_mask
from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import Chunk, NewSlot, SlotSampling, StepPlan
from penstock.services.worker.drafting_executor import DraftingExecutor
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.models.eagle3 import read_eagle3
from penstock.services.worker.models.eagle3_head import load_eagle3
from penstock.services.worker.speculation.eagle3_drafter import Eagle3Drafter
from penstock.services.worker.speculation.model_drafting import ModelDrafting
from penstock.services.worker.speculation.step_costs import Candidate, DraftBudget

DEMO = Path(penstock.demo.__file__).parent
MODEL, HEAD = DEMO / "model", DEMO / "heads" / "eagle3"
DRAFTS, STEPS = 3, 12
GREEDY = SlotSampling(0.0, 0, 1.0, 0).packed()
pytestmark = pytest.mark.skipif(
    not (HEAD / "config.json").exists(), reason="demo/heads is not there"
)


class AllDrafts(DraftBudget):
    def choose(  # type: ignore[override]
        self, rows: int, candidates: list[Candidate], pause: float | None = None
    ) -> list[int]:
        return [one.most for one in candidates]


def test_demo_the_head_that_was_trained_is_served_and_drafts_what_the_model_says() -> None:
    assert sum(file.stat().st_size for file in HEAD.iterdir()) < 2_500_000
    info = read_model_info(MODEL)
    model = load_model(info, torch.float32, torch.device("cpu"), lambda note: None, longest=512)
    executor = DraftingExecutor(model, EngineSizes(64, 16, 1, 512, 512, info.vocab_size))
    served = load_eagle3(*read_eagle3(str(HEAD), info), model.weights.embedding)
    drafting = ModelDrafting(Eagle3Drafter(served, model, executor.slots), DRAFTS, AllDrafts(16))
    drafting.ledger.add = lambda seconds, saved: None  # type: ignore[method-assign]
    executor.speculate(drafting)
    target, tokenizer = load(MODEL, "cpu", torch.float32)
    trained, step, latest = read(target, HEAD), 0, [0]
    drafted = drafting.drafter.draft

    def recorded(decoding: np.ndarray, wanted: np.ndarray) -> list[list[int]]:
        (latest[:],) = found = drafted(decoding, wanted)
        return found

    drafting.drafter.draft = recorded  # type: ignore[method-assign]
    for _, made in questions(["story", "about", "units"], 1, seed=4):
        text = tokenizer.encode(prompt_text(made), add_special_tokens=False).ids
        new = NewSlot(
            0, np.array(text, "<i4").tobytes(), len(text), 0, list(range(32)), GREEDY,
            most=len(text) + 100, corpus=b"corpus",
        )  # fmt: skip
        chunks, gone = [Chunk(0, 0, len(text), True, [])], [0] if step else []
        plan = StepPlan(1, step + 1, step == 0, gone, [new], [], chunks)
        for _ in range(STEPS):
            result, step, known = executor.execute(plan), step + 1, list(text)
            text += np.frombuffer(result.tokens, "<i4").tolist()
            plan = StepPlan(1, step + 1, False, [], [], [], [])
        assert len(latest) == DRAFTS
        with torch.inference_mode():
            ids = torch.tensor([known + latest[:-1]])
            captured, _ = target_rows(target, ids, dense_mask(torch.ones_like(ids)))
            passes = passes_of(trained, ids, torch.ones_like(ids), captured, DRAFTS)
        rows = [logits[0, len(known) - 1 + place] for place, (logits, _) in enumerate(passes)]
        assert [int(trained.ids[row.argmax()]) for row in rows] == latest
    counts = drafting.counts
    assert counts.accepted["eagle3"][0] > 0.4 * counts.drafted["eagle3"][0]
