"""How many drafts a step has, by what steps cost and what was accepted; and when there are any."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from support.worker.plan_driver import GREEDY

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.config.fields import (
    CacheConfig,
    DeviceConfig,
    LoadingConfig,
    SpeculationConfig,
)
from penstock.protocol.config.process_fields import ClusterConfig
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import NewSlot, StepPlan
from penstock.services.worker.gpu.graph_sizes import LEAST_TILES
from penstock.services.worker.planned_step import PlannedStep
from penstock.services.worker.slots import SlotTable
from penstock.services.worker.speculation.drafting import Drafting
from penstock.services.worker.speculation.proposer import OWN, Draft
from penstock.services.worker.speculation.setup import (
    GPU_LEAST_GAIN,
    GPU_TRIED_EVERY,
    make_drafting,
    may_draft,
)
from penstock.services.worker.speculation.step_costs import (
    TRIED_EVERY,
    Acceptance,
    Candidate,
    DraftBudget,
    StepCosts,
)
from penstock.services.worker.speculation.text_proposers import NgramProposer, SuffixProposer

DRAFT = Draft([1, 2, 3, 4, 5, 6], OWN, 8)


def budget_of(seconds: dict[int, float], most_rows: int = 64) -> DraftBudget:
    """seconds: of steps by their rows."""
    budget = DraftBudget(most_rows)
    for rows, each in seconds.items():
        budget.costs.observe(rows, each)
    return budget


def test_a_step_without_drafts_is_measured_first() -> None:
    assert DraftBudget(64).choose(1, [Candidate(0, DRAFT, 0.99)]) == [0]


def test_rows_that_cost_nothing_get_whole_drafts_and_rows_that_cost_a_step_none() -> None:
    likely = [Candidate(0, DRAFT, 0.9)]
    assert budget_of({1: 1.0, 7: 1.0}).choose(1, likely) == [6]
    assert budget_of({1: 1.0, 7: 7.0}).choose(1, likely) == [0]
    (some,) = budget_of({1: 1.0, 7: 2.0}).choose(1, [Candidate(0, DRAFT, 0.6)])
    assert 0 < some < 6


def test_the_likelier_row_gets_the_drafts_and_no_step_outgrows_its_rows() -> None:
    rows = [Candidate(0, DRAFT, 0.3), Candidate(1, DRAFT, 0.95)]
    assert budget_of({2: 1.0, 14: 1.0}, most_rows=8).choose(2, rows) == [0, 6]
    assert sum(budget_of({2: 1.0, 14: 1.0}, most_rows=5).choose(2, rows)) == 3
    assert budget_of({2: 1.0}, most_rows=2).choose(2, rows) == [0, 0]


@pytest.mark.parametrize(("seconds", "drafts"), [(0.05, 6), (0.4, 5), (1.0, 0)])
def test_what_it_takes_to_make_drafts_decides_on_their_number(seconds: float, drafts: int) -> None:
    budget = budget_of({1: 1.0, 7: 1.0})
    budget.pass_costs = StepCosts()
    budget.pass_costs.observe(1, seconds)
    assert budget.choose(1, [Candidate(0, DRAFT, 0.9)]) == [drafts]


def test_drafts_that_do_not_pay_are_tried_again_now_and_then() -> None:
    budget = budget_of({1: 1.0, 7: 7.0})
    counts = [budget.choose(1, [Candidate(0, DRAFT, 0.1)])[0] for _ in range(3 * TRIED_EVERY)]
    assert sum(counts) == 3 and max(counts) == 1


def test_a_trial_for_which_no_draft_is_left_is_over_all_the_same() -> None:
    """Once a draft was expected of a token under way, but the token that came has none."""
    found = [Draft([1], OWN, 8)]

    class Once(NgramProposer):
        def propose(self, slot: int, most: int) -> Draft | None:
            return found[0] if found else None

    budget = budget_of({1: 1.0, 2: 7.0})
    drafting, slots = Drafting(Once(), 4, budget), SlotTable(EngineSizes(8, 8, 1, 8, 64, 100))
    prompt = np.array([1, 2], "<i4").tobytes()
    new = NewSlot(0, prompt, 1, 1, [0, 1, 2, 3], GREEDY.packed(), corpus=b"a")
    plan = StepPlan(1, 1, True, [], [new], [], [])
    slots.apply(plan)
    drafting.begin(plan)
    step = PlannedStep(np.array([0]), [], np.array([0]))
    for _ in range(TRIED_EVERY - 1):
        assert not drafting.pays(step, slots, 1)
    assert drafting.pays(step, slots, 1), "it is tried"
    drawn = found.pop()
    assert drafting.draft(step, slots) is step
    found.append(drawn)
    assert not drafting.pays(step, slots, 1)


def test_a_step_whose_sequences_have_all_left_shows_nothing() -> None:
    drafting = Drafting(NgramProposer(), 4, budget_of({1: 1.0}))
    nothing = np.zeros(0, np.int64)
    drafting.drew(nothing, nothing)
    drafting.begin(StepPlan(1, 1, True, [], [], [], []))


def test_what_was_rejected_lately_is_less_likely_than_before_and_recovers() -> None:
    budget, row = DraftBudget(64), Acceptance()
    before = budget.share(DRAFT, row)
    for _ in range(30):
        budget.observe(DRAFT, 4, 0, row)
    rejected = budget.share(DRAFT, row)
    assert rejected < 0.2 < before
    for _ in range(30):
        budget.observe(DRAFT, 4, 4, row)
    assert budget.share(DRAFT, row) > 0.8
    assert budget.share(DRAFT, Acceptance()) > 0.6, "another row knows its kind of draft"


def drafting_of(
    source: str,
    tokens: int = 10,
    device: str = "cpu",
    budget: int = 2048,
    generates: bool = True,
    seqs: int = 128,
) -> Drafting | None:
    config = Config(
        speculation=SpeculationConfig(speculative=source, speculative_tokens=tokens),  # type: ignore[arg-type]
        device=DeviceConfig(device=device),  # type: ignore[arg-type]
    )
    sizes = EngineSizes(200, 8, seqs, budget, 256, 1_000)
    return make_drafting(config, sizes, generates=generates)


def test_nothing_is_drafted_unless_it_was_asked_for() -> None:
    assert drafting_of("off") is None and drafting_of("off", device="cuda") is None
    assert drafting_of("suffix", generates=False) is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_auto_drafts_from_texts_where_there_is_room_for_drafts(device: str) -> None:
    drafting = drafting_of("auto", device=device)
    assert drafting is not None and drafting.most == 10
    assert isinstance(drafting._proposer, SuffixProposer)
    assert drafting_of("auto", device=device, budget=255) is None
    if device == "cuda":
        assert drafting_of("auto", device=device, seqs=1) is None


def test_auto_drafts_nothing_where_drafts_by_name_are_refused() -> None:
    speculation = SpeculationConfig(speculative="auto")
    plain = Config(speculation=speculation, device=DeviceConfig(device="cuda"))
    assert may_draft(plain)
    for changed in (
        msgspec.structs.replace(plain, device=DeviceConfig(device="null")),
        msgspec.structs.replace(plain, device=DeviceConfig(device="cuda", deterministic=True)),
        msgspec.structs.replace(plain, loading=LoadingConfig(lora=["words=/words"])),
        msgspec.structs.replace(plain, cache=CacheConfig(kv_cache_dtype="int8")),
        msgspec.structs.replace(plain, cluster=ClusterConfig(tensor_parallel_size=2)),
    ):
        assert not may_draft(changed)


def test_drafts_are_as_long_as_a_full_batch_leaves_room_for() -> None:
    for source in ("suffix", "ngram"):
        for tokens, budget, most in ((10, 2048, 10), (31, 2048, 15), (10, 256, 1)):
            drafting = drafting_of(source, tokens, budget=budget)
            assert drafting is not None and drafting.most == most
    with pytest.raises(ConfigError, match=r"--speculative suffix.*--max-num-batched-tokens.*lower"):
        drafting_of("suffix", budget=255)


def test_a_gpu_has_logits_of_as_many_rows_as_it_has_sequences() -> None:
    for seqs, most in ((128, 10), (5, 4)):
        drafting = drafting_of("suffix", device="cuda", seqs=seqs)
        assert drafting is not None and drafting.most == most
        rows = [Candidate(0, Draft([1] * 10, OWN, 8), 0.99)] * seqs
        for one in (drafting.budget.costs, drafting.budget.drafted_costs):
            one.observe(1, 1e-3)
        assert sum(drafting.budget.choose(1, rows)) <= seqs - 1
    with pytest.raises(ConfigError, match=r"--speculative suffix.*--max-num-seqs 1 .*or more"):
        drafting_of("suffix", device="cuda", seqs=1)


def test_a_step_on_a_gpu_drafts_for_as_many_sequences_as_a_graph_has_tiles_for() -> None:
    """The likeliest; and a trial has no more."""
    for seconds, drafts in ((1e-3, 3), (1.0, 1)):
        drafting = drafting_of("suffix", device="cuda", seqs=256)
        assert drafting is not None
        budget = drafting.budget
        budget.costs.observe(60, 1e-3)
        for size in (60, 256):
            budget.drafted_costs.observe(size, seconds)
        rows = [Candidate(row, Draft([1] * 3, OWN, 8), 0.9 + row / 1000) for row in range(60)]
        chosen = [budget.choose(60, rows) for _ in range(GPU_TRIED_EVERY)]
        most = max(chosen, key=sum)
        assert {count for one in chosen for count in one} == {0, drafts}
        assert sum(map(bool, most)) == LEAST_TILES
        if seconds < 1:
            assert all(most[-LEAST_TILES:])


def test_drafts_behind_a_token_under_way_are_as_likely_as_that_token_makes_them() -> None:
    budget = DraftBudget(64, apart=True)
    budget.costs.observe(1, 1.0)
    budget.drafted_costs.observe(1, 1.5)
    for share, known, unknown in ((0.9, True, True), (0.6, True, False), (0.2, False, False)):
        rows = [Candidate(0, DRAFT, share)]
        assert any(budget.choose(1, rows)) == known
        assert any(budget.choose(1, rows, under_way=1)) == unknown
    budget.lead_seconds = 10.0
    assert not any(budget.choose(1, [Candidate(0, DRAFT, 0.9)]))


def test_drafts_that_keep_on_losing_rest_whatever_is_expected_of_them() -> None:
    budget = DraftBudget(64, apart=True, tried_every=5)
    for one in (budget.costs, budget.drafted_costs):
        one.observe(1, 1.0)
    rows = [Candidate(0, DRAFT, 0.9)]
    budget.learn(1, -2.0)
    budget.learn(1, 1.0)
    assert budget.may_look(1) and any(budget.choose(1, rows))
    budget.learn(1, -2.5)
    for _ in range(5):
        assert not any(budget.choose(1, rows))
        assert not budget.may_look(1)
    assert budget.may_look(1) and any(budget.choose(1, rows))


def rests_of(budget: DraftBudget) -> int:
    """For how many steps nothing is looked for."""
    steps = 0
    while not budget.may_look(1):
        steps += 1
    return steps


def test_a_rest_behind_which_drafts_lose_again_is_twice_as_long() -> None:
    budget = DraftBudget(64, apart=True, tried_every=5)
    budget.costs.observe(1, 1.0)
    for rest in (5, 10, 20, 40, 80, 80):
        budget.learn(1, -2.5)
        assert rests_of(budget) == rest
    budget.learn(1, 1.0)
    budget.learn(1, -2.0)
    assert rests_of(budget) == 0, "half of it was gained before"
    budget.learn(1, -2.0)
    assert rests_of(budget) == 5


def test_drafts_that_always_lose_more_than_a_fiftieth_of_a_step_rest_sooner_or_later() -> None:
    for loss, rests in ((0.03, True), (0.015, False)):
        budget = DraftBudget(64, apart=True)
        budget.costs.observe(1, 1.0)
        for _ in range(300):
            budget.learn(1, -loss)
        assert (rests_of(budget) > 0) == rests


def test_where_nothing_is_found_nothing_is_looked_for_in_more_and_more_steps() -> None:
    budget = DraftBudget(64, apart=True)
    budget.costs.observe(1, 1.0)
    skipped = []
    for _ in range(6):
        budget.looked(False)
        skipped.append(rests_of(budget))
    assert skipped == [1, 3, 7, 15, 15, 15]
    budget.looked(True)
    assert budget.may_look(1)


def test_drafts_are_looked_for_where_that_takes_little_of_a_step() -> None:
    budget = DraftBudget(64, apart=True)
    assert not budget.may_look(1), "no step was measured"
    for rows in (1, 128):
        budget.costs.observe(rows, 1e-3)
    assert budget.may_look(8) and not budget.may_look(128)


def seconds_and_tokens(cost: float, pause: float, accepted: float, steps: int) -> tuple[float, int]:
    """Of steps of one row on a GPU, each of which takes a second without drafts. cost: of one with
    drafts; pause: what it takes to wait for a token; accepted: share of the tokens that are what
    was drafted. A draft is found in every step."""
    chance, row = random.Random(7), Acceptance()
    budget = DraftBudget(64, apart=True, least_gain=GPU_LEAST_GAIN, tried_every=GPU_TRIED_EVERY)
    budget.costs.observe(1, 1.0)
    seconds, tokens = 0.0, 0
    for _ in range(steps):
        took, brought = 1.0, 1
        if budget.may_look(1):
            draft = Draft([1] * 10, OWN, chance.choice([3, 5, 8, 20]))
            found = Candidate(0, draft, budget.share(draft, row))
            waits = any(budget.choose(1, [found], under_way=1))
            right = waits and chance.random() < accepted
            (wanted,) = budget.choose(1, [found]) if right else [0]
            took += pause if waits else 0.0
            if waits:
                budget.observe(draft, 1, int(right), row)
            if wanted:
                took = cost + pause
                while brought <= wanted and chance.random() < accepted:
                    brought += 1
                budget.observe(draft, wanted, brought - 1, row)
                budget.drafted_costs.observe(1 + wanted, took)
            if waits:
                budget.learn(1, brought - took)
            budget.looked(wanted > 0)
        seconds, tokens = seconds + took, tokens + brought
    return seconds, tokens


@pytest.mark.parametrize("cost", [1.1, 1.5, 4.0])
@pytest.mark.parametrize("pause", [0.05, 0.5, 3.0])
def test_drafts_lose_no_more_than_a_fiftieth_whatever_becomes_of_them(
    cost: float, pause: float
) -> None:
    for accepted in (0.0, 0.2, 0.4, 0.6, 0.8, 0.95):
        seconds, tokens = seconds_and_tokens(cost, pause, accepted, 2000)
        assert seconds < 1.02 * tokens, accepted
    seconds, tokens = seconds_and_tokens(1.1, 0.05, 0.95, 2000)
    assert tokens > 4 * seconds, "where they are right, they pay"
