"""What slots ask for changes their own tokens, as asked, and nobody else's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.worker.asked_slots import EVERY_KIND, asking, biased, ids
from support.worker.plan_driver import GREEDY, PlanDriver
from support.worker.tiny_models import generated, some_prompts

from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import Chunk, NewSlot, SlotSampling, StepPlan
from penstock.services.worker.model_executor import ModelExecutor
from penstock.services.worker.model_weights import load_model

Folder = Callable[[str], Path]
Run = Callable[..., list[list[int]]]


@pytest.fixture
def run(tiny_folder: Folder) -> Run:
    """Outputs of prompts with these samplings, by an executor of their own."""
    info = read_model_info(tiny_folder("qwen3"))
    capacity = EngineSizes(120, 16, 8, 64, 256, info.vocab_size)
    model = load_model(info, torch.float32, torch.device("cpu"), lambda note: None)

    def outputs(
        prompts: list[list[int]], samplings: list[SlotSampling], count: int = 12, *,
        preemptions: int = 0, seed: int = 1,
    ) -> list[list[int]]:  # fmt: skip
        driver = PlanDriver(ModelExecutor(model, capacity), seed)
        found = driver.run(prompts, count, samplings=samplings, preemptions=preemptions)
        assert not driver.bad
        return found

    return outputs


def test_a_neighbour_that_asks_for_everything_changes_no_greedy_row(run: Run) -> None:
    prompts = some_prompts([9, 4, 12, 7, 5, 6, 8])
    found = run(prompts, [*EVERY_KIND[:3], GREEDY, *EVERY_KIND[3:]])
    assert found[3] == generated("qwen3", prompts[3:4], 12)[0]


def test_a_row_draws_the_same_alone_in_a_batch_and_after_it_lost_its_slot(run: Run) -> None:
    prompts = some_prompts([9, 4, 12, 7, 5, 6])
    together = run(prompts, EVERY_KIND, preemptions=5, seed=4)
    for prompt, sampling, wanted in zip(prompts, EVERY_KIND, together, strict=True):
        assert run([prompt], [sampling]) == [wanted]


def test_only_allowed_tokens_come(run: Run) -> None:
    (greedy, drawn) = run(
        some_prompts([9, 9]), [asking(allowed=ids(5, 9, 11)), asking(5.0, allowed=ids(8))]
    )
    assert set(greedy) <= {5, 9, 11}
    assert set(drawn) == {8}


def test_a_bias_brings_a_token_or_keeps_it_away(run: Run) -> None:
    (prompt,) = some_prompts([9])
    (plain,) = run([prompt], [GREEDY])
    (raised,) = run([prompt], [asking(**biased(t7=100.0))])
    assert raised == [7] * 12
    (lowered,) = run([prompt], [asking(**biased(**{f"t{token}": -100.0 for token in set(plain)}))])
    assert not set(lowered) & set(plain)


def test_end_tokens_do_not_come_before_the_least_number_of_tokens(run: Run) -> None:
    (prompt,) = some_prompts([9])
    every = ids(*range(7), *range(8, 307))
    (found,) = run([prompt], [asking(min_tokens=5, ends=every)], preemptions=2)
    assert found[:5] == [7] * 5
    assert set(found[5:]) != {7}


def test_a_token_may_be_banned_at_one_place_alone(run: Run) -> None:
    (prompt,) = some_prompts([9])
    (plain,) = run([prompt], [GREEDY])
    every = ids(*range(7), *range(8, 307))
    both = {"banned": ids(plain[0]), "banned_until": 1, "min_tokens": 3, "ends": every}
    found, other = run([prompt, prompt], [asking(banned=every, banned_until=2), asking(**both)])
    assert found[:2] == [7] * 2 and set(found[2:]) != {7}
    assert other[:3] == [7] * 3 and set(other[3:]) != {7}


def test_a_bad_word_never_comes_and_its_beginning_may(run: Run) -> None:
    (prompt,) = some_prompts([9])
    (plain,) = run([prompt], [GREEDY])
    word = plain[3:5]
    first = next(i for i in range(4) if plain[i : i + 2] == word)
    (found,) = run([prompt], [asking(bad_words=[ids(*word)])], preemptions=2)
    assert found[: first + 1] == plain[: first + 1]
    assert found[first + 1] != plain[first + 1]
    assert word not in [found[i : i + 2] for i in range(len(found))]


def test_a_strong_penalty_keeps_tokens_from_coming_twice(run: Run) -> None:
    (prompt,) = some_prompts([9])
    (found,) = run([prompt], [asking(presence=2.0, frequency=2.0, repetition=10.0)], preemptions=2)
    assert len(set(found)) == len(found)
    assert not set(found) & set(prompt)


def test_slots_that_begin_behind_a_cached_prefix_draw_as_if_all_had_been_sent(
    tiny_folder: Folder,
) -> None:
    info = read_model_info(tiny_folder("qwen3"))
    capacity = EngineSizes(120, 16, 16, 600, 256, info.vocab_size)
    model = load_model(info, torch.float32, torch.device("cpu"), lambda note: None)
    executor = ModelExecutor(model, capacity)
    (tokens,) = some_prompts([40])
    kinds = [*EVERY_KIND, asking(1.2, bad_words=[ids(tokens[-1], 7), ids(9)]), GREEDY]

    def drawn(prompt_len: int, starts: list[int], prompts: list[bytes], step: int) -> list[int]:
        added = [
            NewSlot(
                slot, ids(*tokens[start:]), prompt_len, 32, [0, 1], kind.packed(), 0, None, start,
                0 if prompts and start else -1,
            )
            for slot, (kind, start) in enumerate(zip(kinds, starts, strict=True))
        ]  # fmt: skip
        chunks = [Chunk(slot, 32, 8, True, [3 + slot]) for slot in range(len(kinds))]
        plan = StepPlan(1, step, True, [], added, [], chunks, prompts=prompts)
        found = np.frombuffer(executor.execute(plan).tokens, "<i4").tolist()
        decoded = executor.execute(StepPlan(1, step + 1, False, [], [], [], []))
        return [*found, *np.frombuffer(decoded.tokens, "<i4").tolist()]

    owner = NewSlot(0, ids(*tokens), 40, 0, [], GREEDY.packed())
    executor.execute(StepPlan(1, 1, True, [], [owner], [], [Chunk(0, 0, 40, True, [0, 1, 2])]))
    for prompt_len in (36, 20):
        whole = drawn(prompt_len, [0] * len(kinds), [], 2)
        start = min(32, prompt_len)
        starts = [32 if kind.adjustments is None else start for kind in kinds]
        assert drawn(prompt_len, starts, [ids(*tokens[:prompt_len])], 4) == whole
        assert len(set(whole)) > 3


def test_a_row_that_may_take_nothing_is_told_from_one_that_is_not_finite(
    tiny_folder: Folder,
) -> None:
    info = read_model_info(tiny_folder("qwen2"))
    capacity = EngineSizes(120, 16, 8, 64, 256, info.vocab_size)
    model = load_model(info, torch.float32, torch.device("cpu"), lambda note: None)
    model.weights.embedding[5] = torch.nan
    executor = ModelExecutor(model, capacity)
    every = ids(*range(info.vocab_size))
    kinds = [GREEDY, asking(min_tokens=9, ends=every), asking(0.8, allowed=b""), GREEDY]
    last = [6, 6, 5, 5]
    added = [
        NewSlot(slot, ids(7, last[slot]), 2, 0, [], kind.packed())
        for slot, kind in enumerate(kinds)
    ]
    chunks = [Chunk(slot, 0, 2, True, [slot]) for slot in range(4)]
    result = executor.execute(StepPlan(1, 1, True, [], added, [], chunks))
    assert (result.banned_rows, result.bad_rows) == ([1], [2, 3])
