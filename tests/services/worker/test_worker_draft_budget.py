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
from penstock.services.worker.gpu.graph_sizes import DRAFTED_ROWS, drafted_sizes
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
    HOST_CREDIT,
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
    assert DraftBudget(64).choose(1, [Candidate(0, DRAFT, 0.99, 6)]) == [0]


def test_rows_that_cost_nothing_get_whole_drafts_and_rows_that_cost_a_step_none() -> None:
    likely = [Candidate(0, DRAFT, 0.9, 6)]
    assert budget_of({1: 1.0, 7: 1.0}).choose(1, likely) == [6]
    assert budget_of({1: 1.0, 7: 7.0}).choose(1, likely) == [0]
    (some,) = budget_of({1: 1.0, 7: 2.0}).choose(1, [Candidate(0, DRAFT, 0.6, 6)]) or []
    assert 0 < some < 6


def test_the_likelier_row_gets_the_drafts_and_no_step_outgrows_its_rows() -> None:
    rows = [Candidate(0, DRAFT, 0.3, 6), Candidate(1, DRAFT, 0.95, 6)]
    assert budget_of({2: 1.0, 14: 1.0}, most_rows=8).choose(2, rows) == [0, 6]
    assert sum(budget_of({2: 1.0, 14: 1.0}, most_rows=5).choose(2, rows) or []) == 3
    assert budget_of({2: 1.0}, most_rows=2).choose(2, rows) == [0, 0]


@pytest.mark.parametrize(("seconds", "drafts"), [(0.05, 6), (0.4, 5), (1.0, 0)])
def test_what_it_takes_to_make_drafts_decides_on_their_number(seconds: float, drafts: int) -> None:
    budget = budget_of({1: 1.0, 7: 1.0})
    budget.pass_costs = StepCosts()
    budget.pass_costs.observe(1, seconds)
    assert budget.choose(1, [Candidate(0, DRAFT, 0.9, 6)]) == [drafts]


def test_drafts_that_do_not_pay_are_tried_again_now_and_then() -> None:
    budget = budget_of({1: 1.0, 7: 7.0})
    rows = [Candidate(0, DRAFT, 0.1, 6)]
    counts = []
    for _ in range(3 * TRIED_EVERY):
        budget.passed(1.0)
        counts.append((budget.choose(1, rows) or [0])[0])
    assert sum(counts) == 3 and max(counts) == 1
    budget.passed(TRIED_EVERY)
    assert budget.choose(1, rows) == [1], "it counts how long it was, not how often it was looked"


def test_a_larger_size_of_a_ladder_is_tried_before_it_is_taken_for_too_dear() -> None:
    budget = DraftBudget(128, ladder=drafted_sizes(128))
    budget.costs.observe(8, 0.7)
    for _ in range(20):  # of single rows with drafts: the last two sizes differ by chance
        budget.drafted_costs.observe(8, 1.0)
        budget.drafted_costs.observe(11, 1.25)
    rows = [Candidate(row, Draft([1] * 10, OWN, 20), 0.9, 10, 2) for row in range(8)]
    chosen = sum(budget.choose(8, rows) or [])
    assert chosen > 16
    tried = 8 + chosen
    budget.drafted_costs.observe(tried, 70.0)
    assert budget.drafted_costs.seconds(tried) < 10, "the first may have been held up by others"
    for _ in range(20):
        budget.drafted_costs.observe(tried, 9.0)
    assert sum(budget.choose(8, rows) or []) <= 8, "it is as dear as that"


def test_a_step_that_others_held_up_makes_no_drafts_look_cheap() -> None:
    budget = DraftBudget(64, ladder=drafted_sizes(64))
    for _ in range(9):
        budget.costs.observe(8, 1.0)
        budget.drafted_costs.observe(16, 1.3)
    rows = [Candidate(row, DRAFT, 0.25, 1) for row in range(8)]
    for seconds in (1.0, 9.0):
        budget.costs.observe(8, seconds)
        assert not any(budget.choose(8, rows) or []), "a quarter more tokens for 1.3 times as long"


def test_steps_that_are_padded_to_one_size_are_one_measure() -> None:
    costs = StepCosts(drafted_sizes(40))
    assert [costs.size(rows) for rows in (1, 4, 5, 17, 24, 33, 40)] == [4, 4, 8, 24, 24, 40, 40]
    costs.observe(9, 1.0)
    assert costs.seconds(16) == costs.seconds(3) == 1.0
    assert 1.0 < costs.seconds(17) == costs.seconds(24) < 1.2
    costs.observe(33, 2.0)
    assert costs.seconds(24) == pytest.approx(1 + (24 - 16) / (40 - 16))


class Known(NgramProposer):
    """Has one draft for every text."""

    def propose(self, slot: int, most: int) -> Draft | None:
        return Draft(DRAFT.tokens[:most], OWN, 8)


def test_a_guess_begins_behind_the_last_known_token_and_drafts_behind_those_under_way() -> None:
    budget = budget_of({1: 1.0, 7: 1.0})
    drafting, slots = Drafting(Known(), 4, budget), SlotTable(EngineSizes(8, 8, 1, 8, 64, 100))
    slots.row_tokens = 5
    prompt = np.array([1, 2], "<i4").tobytes()
    new = NewSlot(0, prompt, 1, 1, [0, 1, 2, 3], GREEDY.packed(), corpus=b"a")
    plan = StepPlan(1, 1, True, [], [new], [], [])
    slots.apply(plan)
    drafting.begin(plan)
    slots.position[0], slots.pending[0] = 7, 1  # two steps under way, one with a draft
    step = PlannedStep(np.array([0]), [], np.array([0]))
    (guess,) = drafting.guess(step, slots, np.array([2]), 10.0) or []
    assert (guess.row, guess.slot, guess.known, guess.drafts) == (0, 0, 5, 4)
    assert guess.draft.tokens == DRAFT.tokens
    assert drafting.guess(step, slots, np.array([6]), 10.0) == [], "all of it is under way"
    assert drafting.guess(step, slots, np.array([2]), 0.0) is None, "waiting costs nothing"
    drafting.settled([guess], [4], [3])
    assert drafting.counts.drafted == {OWN: [1, 1, 1, 1]}
    assert drafting.counts.accepted == {OWN: [1, 1, 0, 0]}
    drafting.settled([guess], [-1], [1])
    assert drafting.counts.drafted == {OWN: [1, 1, 1, 1]}, "the text had gone on otherwise"


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
        rows = [Candidate(0, Draft([1] * 10, OWN, 8), 0.99, 10)] * seqs
        for one in (drafting.budget.costs, drafting.budget.drafted_costs):
            one.observe(1, 1e-3)
        assert sum(drafting.budget.choose(1, rows) or []) <= seqs - 1
    with pytest.raises(ConfigError, match=r"--speculative suffix.*--max-num-seqs 1 .*or more"):
        drafting_of("suffix", device="cuda", seqs=1)


def test_a_step_on_a_gpu_with_drafts_has_no_more_rows_than_its_graphs() -> None:
    drafting = drafting_of("suffix", device="cuda", seqs=256)
    assert drafting is not None
    budget = drafting.budget
    budget.costs.observe(60, 1e-3)
    for size in (60, 128):
        budget.drafted_costs.observe(size, 1e-3)
    rows = [Candidate(row, Draft([1] * 3, OWN, 8), 0.9 + row / 1000, 3) for row in range(60)]
    chosen = budget.choose(60, rows)
    assert chosen is not None and sum(chosen) == DRAFTED_ROWS[-1] - 60
    assert chosen[-1] > chosen[0], "the likeliest have more"


def test_drafts_behind_a_token_under_way_are_as_likely_as_that_token_makes_them() -> None:
    budget = DraftBudget(64, ladder=drafted_sizes(64))
    budget.costs.observe(1, 1.0)
    budget.drafted_costs.observe(1, 1.7)
    budget.drafted_costs.observe(7, 1.9)
    for share, known, unknown in ((0.9, True, True), (0.6, True, False), (0.2, False, False)):
        found = Candidate(0, DRAFT, share, 6)
        assert any(budget.choose(1, [found]) or []) == known
        assert any(budget.choose(1, [found._replace(depth=1)]) or []) == unknown


def test_tokens_under_way_are_waited_for_where_the_pause_costs_less_than_their_chance() -> None:
    budget = DraftBudget(64, ladder=drafted_sizes(64))
    for one in (budget.costs, budget.drafted_costs):
        one.observe(1, 1.0)
    deep = [Candidate(0, DRAFT, 0.8, 6, 4)]
    assert budget.choose(1, deep, 0.01) is None
    assert budget.choose(1, deep, 3.0) is not None, "the device would idle for too long"
    assert budget.choose(1, deep) is not None, "nobody waits"
    sure = [Candidate(0, DRAFT, 0.99, 6, 4)]
    assert budget.choose(1, sure, 0.3) == [6]
    assert budget.choose(1, [Candidate(0, DRAFT, 0.1, 6, 4)], 0.0) == [0]


def test_drafts_that_keep_on_losing_rest_whatever_is_expected_of_them() -> None:
    budget = DraftBudget(64, ladder=drafted_sizes(64), tried_every=5)
    for one in (budget.costs, budget.drafted_costs):
        one.observe(1, 1.0)
    rows = [Candidate(0, DRAFT, 0.9, 6)]
    budget.learn(1, -0.9)
    budget.learn(1, 0.9)
    assert budget.may_look(1) and any(budget.choose(1, rows) or [])
    budget.learn(1, -2.5)
    for _ in range(5):
        assert not any(budget.choose(1, rows) or [])
        assert not budget.may_look(1)
        budget.passed(1.0)
    assert budget.may_look(1) and any(budget.choose(1, rows) or [])


def rests_of(budget: DraftBudget) -> int:
    """For how many steps nothing is looked for, if the host has the time."""
    steps = 0
    budget.passed(10.0)
    while not budget.may_look(1):
        steps += 1
    return steps


def test_a_rest_behind_which_drafts_lose_again_is_twice_as_long() -> None:
    budget = DraftBudget(64, ladder=drafted_sizes(64), tried_every=5)
    budget.costs.observe(1, 1.0)
    for rest in (5, 10, 20, 40, 80, 80):
        budget.learn(1, -2.5)
        assert rests_of(budget) == rest
    budget.learn(1, 1.0)
    budget.learn(1, -1.5)
    assert rests_of(budget) == 0, "most of it was gained before"
    budget.learn(1, -1.5)
    assert rests_of(budget) == 5


def test_drafts_that_always_lose_more_than_a_hundredth_of_a_step_rest_sooner_or_later() -> None:
    for loss, rests in ((0.015, True), (0.008, False)):
        budget = DraftBudget(64, ladder=drafted_sizes(64))
        budget.costs.observe(1, 1.0)
        for _ in range(300):
            budget.learn(1, -loss)
        assert (rests_of(budget) > 0) == rests


def test_looking_takes_the_host_a_two_hundredth_of_all_steps_and_what_drafts_gain() -> None:
    budget = DraftBudget(64, ladder=drafted_sizes(64))
    assert not budget.may_look(1), "no step was measured"
    budget.costs.observe(1, 1e-3)
    assert not budget.may_look(64), "no row is left for drafts"
    looked = 0
    for _ in range(10_000):
        budget.passed(1e-3)
        if budget.may_look(1):
            looked += 1
            budget.looked(1e-4)
    begun = round(HOST_CREDIT / 1e-4)
    assert 500 <= looked <= 500 + begun + 1
    budget.looked(HOST_CREDIT)
    assert not budget.may_look(1)
    budget.learn(1, 2 * HOST_CREDIT)
    assert budget.may_look(1)


def seconds_and_tokens(cost: float, pause: float, accepted: float, steps: int) -> tuple[float, int]:
    """Of steps of one row on a GPU, each of which takes a second without drafts. cost: of one with
    drafts; pause: what it takes to wait for a token; accepted: share of the tokens that are what
    was drafted. A draft is found in every step."""
    chance, row = random.Random(7), Acceptance()
    budget = DraftBudget(
        64, ladder=drafted_sizes(64), least_gain=GPU_LEAST_GAIN, tried_every=GPU_TRIED_EVERY
    )
    budget.costs.observe(1, 1.0)
    seconds, tokens = 0.0, 0
    for _ in range(steps):
        took, brought = 1.0, 1
        if budget.may_look(1):
            draft = Draft([1] * 10, OWN, chance.choice([3, 5, 8, 20]))
            found = Candidate(0, draft, budget.share(draft, row), 10, 1)
            chosen = budget.choose(1, [found], pause)
            waits, known = chosen is None, chosen is None or chance.random() < accepted
            if chosen is None:
                took += pause
                chosen = budget.choose(1, [found._replace(depth=0)])
            (wanted,) = chosen or [0]
            if wanted:
                took += cost - 1.0
                while known and brought <= wanted and chance.random() < accepted:
                    brought += 1
                budget.observe(draft, wanted if known else 1, brought - 1, row)
                budget.drafted_costs.observe(1 + wanted, cost)
            if waits or wanted:
                budget.learn(1, brought - took)
        budget.passed(took)
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
