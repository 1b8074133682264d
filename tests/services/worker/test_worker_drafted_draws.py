"""Drawn tokens beside drafts have the distribution that the model says."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.worker.oracle_drafts import AllDrafts, OracleProposer
from support.worker.plan_driver import PlanDriver
from support.worker.tiny_models import make_model, some_prompts
from test_worker_model_executor import executor_for

from penstock.protocol.wire.messages.steps import SlotAdjustments, SlotSampling
from penstock.services.worker.drafting_executor import DraftingExecutor
from penstock.services.worker.speculation.drafting import Drafting

TOP, LENGTH, DRAWS = 3, 4, 3_000


def exact(prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Probability of each output of ``LENGTH`` tokens, each of the ``TOP`` likeliest: by
    transformers' logits."""
    model = make_model("llama").eval()
    outputs: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        texts = list(outputs)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + list(text) for text in texts])).logits[:, -1]
        values, tokens = logits.double().topk(TOP)
        shares = values.softmax(-1)
        outputs = {
            (*text, int(tokens[row, place])): outputs[text] * float(shares[row, place])
            for row, text in enumerate(texts)
            for place in range(TOP)
        }
    return outputs


def too_far(observed: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> bool:
    """Pearson's chi-square, beyond 5 standard deviations of its Wilson-Hilferty approximation;
    outputs that are expected less than 5 times count as one."""
    total = sum(observed.values())
    common = [one for one, share in expected.items() if total * share >= 5]
    pairs = [(observed[one], total * expected[one]) for one in common]
    rest = total - sum(seen for seen, _ in pairs), total - sum(mean for _, mean in pairs)
    if rest[1] >= 5:
        pairs.append(rest)
    square = sum((seen - mean) ** 2 / mean for seen, mean in pairs)
    freedom = len(pairs) - 1
    spread = 2 / (9 * freedom)
    return bool(((square / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5 > 5)


@pytest.mark.slow
@pytest.mark.parametrize("in_turn", [False, True], ids=["at once", "in turn"])
def test_draws_without_a_seed_have_the_exact_distribution(
    in_turn: bool, tiny_folder: Callable[[str], Path]
) -> None:
    (prompt,) = some_prompts([12])
    expected = exact(prompt)
    likely = sorted(expected, key=lambda one: -expected[one])[:9]
    executor = executor_for(tiny_folder("llama"), kind=DraftingExecutor)
    proposer = OracleProposer([(prompt, list(one)) for one in likely], 0.1)
    drafting = Drafting(proposer, LENGTH - 1, AllDrafts(64))
    executor.speculate(drafting)
    adjustments = SlotAdjustments(no_repeat_ngram=LENGTH + 12) if in_turn else None
    seeds = random.Random(7)
    samplings = [
        SlotSampling(1.0, TOP, 1.0, seeds.getrandbits(63), adjustments=adjustments)
        for _ in range(DRAWS)
    ]
    driver, found = PlanDriver(executor, 3), []
    for some in (
        samplings[at : at + 16] for at in range(0, DRAWS, 16)
    ):  # a step with prefill has no drafts
        found += driver.run(len(some) * [prompt], LENGTH, samplings=some, chunk=100)
    observed = Counter(map(tuple, found))
    assert set(observed) <= set(expected)
    drafted, accepted = (
        counts["own"] for counts in (drafting.counts.drafted, drafting.counts.accepted)
    )
    assert 0.05 < sum(accepted) / sum(drafted) < 0.95
    assert not too_far(observed, expected)


def test_the_measure_tells_a_false_distribution_from_the_exact_one() -> None:
    cells = list(itertools.product(range(3), repeat=4))
    draws = np.random.default_rng(1)
    shares = draws.dirichlet(np.ones(len(cells)))
    exactly = dict(zip(cells, shares.tolist(), strict=True))
    tempered = shares**0.8 / (shares**0.8).sum()
    for weights, far in ((shares, False), (tempered, True)):
        numbers = draws.choice(len(cells), DRAWS, p=weights)
        assert too_far(Counter(cells[at] for at in numbers), exactly) is far
