"""Who may come in: counted and decided without a clock and without a socket."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.client.admission import (
    UNSEEN_SECONDS,
    AdmissionController,
    PipelineLoad,
    prompt_tokens,
)
from penstock.protocol.config import AdmissionConfig
from penstock.protocol.wire.messages.membership import Demand
from penstock.protocol.wire.messages.requests import Chat, PromptText, Rejected, Tokens

SLOTS = 10
SERVICE = 2.0
"""Seconds that the engine below takes for a request on average: 5 requests a second."""
TICK = 0.05


@dataclass
class Engine:
    """Admission with an engine behind it."""

    limits: AdmissionConfig
    frontends: int = 1
    others: Demand = field(default_factory=Demand)
    now: float = 100.0
    queue: list[int] = field(default_factory=list)
    running: dict[int, float] = field(default_factory=dict)
    last: int = 0

    def __post_init__(self) -> None:
        self.admission = AdmissionController(self.limits)
        self.random = random.Random(1)
        self.look()

    @property
    def open(self) -> int:
        return len(self.queue) + len(self.running)

    def look(self) -> None:
        load = PipelineLoad(float(SLOTS), 1000, self.frontends, self.others)
        self.admission.look(load, self.open, self.now)

    def ask(
        self, tenant: str = "", tokens: int = 10, left: float | None = None, draw: float = 0.5
    ) -> Rejected | None:
        refusal = self.admission.refusal(self.open, tenant, tokens, left, self.now, draw)
        if refusal is None:
            self.last += 1
            self.queue.append(self.last)
            self.admission.entered(self.last, tenant, tokens)
        return refusal

    def cancel(self, request_id: int) -> None:
        self.admission.left(request_id)
        self.queue.remove(request_id)

    def pass_time(self, seconds: float, **arrivals: float) -> dict[str, list[int]]:
        """Let time go by with so many arrivals a second of each tenant; the statuses by tenant."""
        found: dict[str, list[int]] = {tenant: [] for tenant in arrivals}
        due = dict.fromkeys(arrivals, 0.0)
        for _ in range(round(seconds / TICK)):
            self.now += TICK
            for request_id in [i for i, ends in self.running.items() if ends <= self.now]:
                del self.running[request_id]
            while self.queue and len(self.running) < SLOTS:
                request_id = self.queue.pop(0)
                self.running[request_id] = self.now + SERVICE * self.random.uniform(0.5, 1.5)
                self.admission.started(request_id)
            self.look()
            for tenant, rate in arrivals.items():
                due[tenant] += rate * TICK
                while due[tenant] >= 1.0:
                    due[tenant] -= 1.0
                    refusal = self.ask(tenant)
                    found[tenant].append(200 if refusal is None else refusal.status)
        return found


def limits(**changes: Any) -> AdmissionConfig:
    return AdmissionConfig(**changes)


def test_a_burst_into_an_idle_server_comes_in_whole() -> None:
    engine = Engine(limits(max_wait_s=1.0))
    assert [engine.ask() for _ in range(500)] == [None] * 500


def test_the_number_of_waiting_requests_is_bounded_beyond_those_that_find_a_slot() -> None:
    engine = Engine(limits(max_waiting_requests=3))
    assert [engine.ask() for _ in range(SLOTS + 3)] == [None] * (SLOTS + 3)
    refusal = engine.ask()
    assert refusal is not None
    assert (refusal.status, refusal.kind) == (503, "overloaded_error")
    assert "--max-waiting-requests" in refusal.message
    engine.cancel(engine.queue[-1])
    assert engine.ask() is None


@pytest.mark.parametrize("times", [1.5, 3, 10])
def test_under_overload_what_comes_in_waits_no_longer_than_allowed(times: float) -> None:
    engine = Engine(limits(max_wait_s=4.0))
    engine.pass_time(20.0, one=5.0 * times)
    statuses = engine.pass_time(60.0, one=5.0 * times)["one"]
    assert 0.95 * 5 * 60 <= statuses.count(200) <= 1.05 * 5 * 60, "the engine is kept busy"
    assert set(statuses) == {200, 503}
    assert 10 <= len(engine.queue) <= 1.25 * 4.0 * 5


def test_a_first_flood_is_stopped_before_any_request_has_ended() -> None:
    engine = Engine(limits(max_wait_s=1.0))
    statuses = engine.pass_time(SERVICE / 2, one=50.0)["one"]
    assert 503 in statuses and len(engine.running) == SLOTS
    assert engine.last < 50.0 * SERVICE / 2 * 0.8


def test_below_capacity_nothing_is_refused() -> None:
    engine = Engine(limits(max_wait_s=2.0))
    assert set(engine.pass_time(60.0, one=4.0)["one"]) == {200}


def test_what_is_refused_is_told_when_the_queue_of_now_is_over_at_random() -> None:
    engine = Engine(limits(max_wait_s=4.0))
    engine.pass_time(30.0, one=50.0)
    times = [
        refusal.retry_after
        for draw in (0.0, 0.5, 0.99)
        if (refusal := engine.ask(draw=draw)) is not None and refusal.retry_after is not None
    ]
    assert times == pytest.approx([2.1, 4.2, 6.2], rel=0.15)
    assert "--max-wait-s" in str(engine.ask())


def test_retry_after_is_between_a_second_and_half_a_minute() -> None:
    engine = Engine(limits(max_waiting_requests=1000, max_wait_s=3600.0))
    engine.pass_time(30.0, one=100.0)
    slow = [engine.ask(draw=draw) for draw in (0.0, 0.99)]
    quick = Engine(limits(max_waiting_requests=1))
    for _ in range(SLOTS + 1):
        quick.ask()
    quick_answer = quick.ask(draw=0.0)
    assert [r and r.retry_after for r in slow] == [30.0, 30.0]
    assert quick_answer is not None and quick_answer.retry_after == 1.0


def test_nobody_waits_past_his_own_time() -> None:
    engine = Engine(limits(max_wait_s=20.0))
    engine.pass_time(20.0, one=6.0)
    assert len(engine.queue) >= 10
    assert engine.ask(left=1.0) is not None
    assert engine.ask(left=15.0) is None


def test_an_idle_server_forgets_how_long_requests_took() -> None:
    engine = Engine(limits(max_wait_s=1.0))
    engine.pass_time(30.0, one=50.0)
    engine.pass_time(SERVICE * 3)
    assert [engine.ask() for _ in range(60)].count(None) < 60
    engine.pass_time(SERVICE * 3 + 10.0)
    engine.pass_time(10.0)
    assert [engine.ask() for _ in range(60)] == [None] * 60


def test_requests_that_leave_the_queue_do_not_count_as_served() -> None:
    engine = Engine(limits(max_wait_s=4.0))
    engine.pass_time(20.0, one=20.0)
    for _ in range(200):
        engine.pass_time(TICK, one=20.0)
        for request_id in engine.queue[5:]:
            engine.cancel(request_id)
    while engine.ask() is None:
        pass
    assert len(engine.queue) <= 1.25 * 4.0 * 5


# --- prompt tokens


def test_the_prompt_tokens_that_wait_are_bounded() -> None:
    engine = Engine(limits(max_waiting_tokens=100))
    assert engine.ask(tokens=5000) is None, "one prompt may be longer than the limit"
    refusal = engine.ask(tokens=1)
    assert refusal is not None and refusal.status == 503
    assert "5000 prompt tokens" in refusal.message and "--max-waiting-tokens" in refusal.message
    engine.pass_time(TICK)
    assert engine.ask(tokens=90) is None
    assert engine.ask(tokens=20) is not None
    engine.admission.counted(engine.last, 60)  # the tokenizer knows better
    assert engine.ask(tokens=20) is None


def test_left_to_itself_the_bound_on_tokens_follows_kv_memory() -> None:
    engine = Engine(limits())
    engine.ask(tokens=2**20 - 5)
    assert engine.ask(tokens=6) is not None
    load = PipelineLoad(float(SLOTS), 2**18)
    engine.admission.look(load, engine.open, engine.now)
    assert engine.ask(tokens=2**20) is None
    assert engine.ask(tokens=6) is not None


def test_tokens_are_guessed_from_bytes_until_they_are_counted() -> None:
    assert prompt_tokens(PromptText("x" * 400)) == 101
    assert prompt_tokens(Chat(b"x" * 400)) == 101
    assert prompt_tokens(Tokens(b"\0" * 400)) == 100


# --- tenants


def test_a_flood_leaves_room_for_others_and_is_told_429() -> None:
    engine = Engine(limits(max_wait_s=4.0))
    engine.pass_time(20.0, flood=50.0, modest=1.0)
    found = engine.pass_time(30.0, flood=50.0, modest=1.0)
    assert set(found["modest"]) == {200}
    assert set(found["flood"]) == {200, 429}
    refusal = engine.ask("flood")
    assert refusal is not None
    assert (refusal.status, refusal.kind) == (429, "rate_limit_error")
    assert "--max-tenant-share" in refusal.message and refusal.retry_after


def test_several_floods_share_the_room_and_leave_some() -> None:
    engine = Engine(limits(max_wait_s=4.0))
    engine.pass_time(20.0, one=50.0, two=50.0, three=50.0, modest=0.5)
    found = engine.pass_time(120.0, one=50.0, two=50.0, three=50.0, modest=0.5)
    assert found["modest"].count(200) >= 0.9 * len(found["modest"])
    served = [found[name].count(200) for name in ("one", "two", "three")]
    assert min(served) >= 0.7 * max(served)


def test_a_tenant_alone_has_the_whole_room_and_never_sees_429() -> None:
    engine = Engine(limits(max_wait_s=4.0))
    assert set(engine.pass_time(60.0, one=50.0)["one"]) == {200, 503}
    assert len(engine.queue) >= 16


def test_who_comes_into_a_full_room_finds_a_place_soon() -> None:
    engine = Engine(limits(max_wait_s=4.0))
    engine.pass_time(30.0, flood=50.0)
    assert engine.ask("late") is not None
    engine.pass_time(1.5, flood=50.0)
    assert engine.ask("late") is None


def test_a_share_of_one_switches_it_off() -> None:
    engine = Engine(limits(max_wait_s=4.0, max_tenant_share=1.0))
    found = engine.pass_time(30.0, flood=50.0, modest=1.0)
    assert set(found["flood"]) == {200, 503}


def test_tenants_do_not_matter_while_nobody_waits() -> None:
    engine = Engine(limits())
    assert [engine.ask(tenant) for tenant in ["a", *["b"] * (SLOTS - 1)]] == [None] * SLOTS


# --- several frontends


def test_what_other_frontends_have_open_counts() -> None:
    others = Demand(SLOTS + 3, 3, 50, 0)
    engine = Engine(limits(max_waiting_requests=5), frontends=2, others=others)
    assert [engine.ask() for _ in range(2)] == [None] * 2
    assert engine.ask() is not None
    tokens = Engine(limits(max_waiting_tokens=100), frontends=2, others=others)
    assert tokens.ask(tokens=50) is None
    assert tokens.ask(tokens=1) is not None


def test_several_frontends_do_not_let_requests_in_to_the_same_places() -> None:
    """Each hears of the others half a second late, and lets in its part until then."""

    def let_in(engine: Engine) -> int:
        before = len(engine.queue)
        while engine.ask("someone") is None:
            pass
        return len(engine.queue) - before

    def places(frontends: int) -> tuple[int, int]:
        engine = Engine(limits(max_wait_s=4.0), frontends)
        engine.pass_time(30.0, someone=20.0)
        for request_id in list(engine.queue):
            engine.cancel(request_id)
        engine.now += UNSEEN_SECONDS + TICK
        engine.look()
        first = let_in(engine)
        engine.now += UNSEEN_SECONDS + TICK  # nobody else came
        engine.look()
        return first, let_in(engine)

    (alone, more), (first, second) = places(1), places(2)
    assert alone > 10 and more <= 2
    assert first == pytest.approx(alone / 2, abs=2)
    assert second == pytest.approx(alone / 4, abs=2)


def test_a_frontend_that_leaves_as_the_first_request_comes_costs_nobody_an_answer() -> None:
    engine = Engine(limits(), frontends=2, others=Demand(0, 0, 0, 100))
    engine.pass_time(20.0)  # idle: the pace is forgotten
    assert engine.ask() is None
    engine.others = Demand()
    engine.pass_time(2 * TICK)
    assert engine.ask() is None


def test_what_another_frontend_did_before_it_joined_says_nothing_of_the_pace() -> None:
    engine = Engine(limits(max_wait_s=4.0), frontends=2)
    engine.pass_time(30.0, someone=20.0)
    allowed = len(engine.queue)
    engine.others = Demand(0, 0, 0, 1_000_000)
    engine.pass_time(1.0, someone=100.0)
    assert len(engine.queue) < 4 * allowed


def test_others_hear_what_is_open_here() -> None:
    engine = Engine(limits())
    for _ in range(SLOTS + 4):
        engine.ask(tokens=7)
    engine.pass_time(TICK)
    assert engine.admission.demand(engine.open) == Demand(SLOTS + 4, 4, 28, 0)
    engine.pass_time(4 * SERVICE)
    assert engine.admission.demand(engine.open) == Demand(0, 0, 0, SLOTS + 4)


def test_a_tenant_s_requests_elsewhere_are_taken_to_be_as_many_as_here() -> None:
    engine = Engine(limits(max_waiting_requests=40), frontends=2)
    engine.others = Demand(SLOTS, 0, 0, 0)
    engine.look()
    engine.ask("modest")
    while engine.ask("flood") is None:
        pass
    alone = Engine(limits(max_waiting_requests=40))
    for _ in range(SLOTS):
        alone.ask("modest")
    while alone.ask("flood") is None:
        pass
    assert len(engine.queue) - 1 == pytest.approx((len(alone.queue) - SLOTS) * 2 / 3, abs=2)


def test_an_engine_that_is_back_before_it_is_seen_refuses_nobody() -> None:
    engine = Engine(limits())
    engine.pass_time(10.0, someone=20.0)
    engine.admission.look(PipelineLoad(0.0, 1000), engine.open, engine.now)
    assert engine.ask() is None


def test_each_prompt_of_a_batch_counts_until_it_has_brought_something() -> None:
    admission = AdmissionController(limits())
    admission.entered(1, "ann", 100, prompts=10)
    admission.entered(2, "bob", 7)
    assert admission.demand(11) == Demand(11, 11, 107, 0)
    assert not admission.started(1)
    assert admission.demand(10) == Demand(10, 10, 97, 1)
    admission.counted(1, 18)  # the tokenizer says how many tokens the rest has
    assert admission.demand(10).waiting_tokens == 25
    assert not any(admission.started(1) for _ in range(8))
    assert admission.demand(2) == Demand(2, 2, 9, 9)
    assert admission.started(1) and admission.started(2)
    assert admission.demand(0) == Demand(0, 0, 0, 11)
    assert admission.started(1)  # later rows say nothing new
    assert admission.demand(0) == Demand(0, 0, 0, 11)


def test_a_batch_that_is_given_up_leaves_with_what_of_it_waited() -> None:
    admission = AdmissionController(limits())
    admission.entered(1, "ann", 100, prompts=10)
    for _ in range(4):
        admission.started(1)
    admission.left(1)
    assert admission.demand(0) == Demand(0, 0, 0, 4)
    admission.left(1)
    assert admission.demand(0) == Demand(0, 0, 0, 4)


def test_a_batch_comes_in_whole_where_nothing_waits_or_all_of_it_has_room() -> None:
    engine = Engine(limits(max_waiting_requests=20))

    def ask(prompts: int) -> Rejected | None:
        found = engine.admission.refusal(engine.open, "", 10, None, engine.now, 0.5, prompts)
        if found is None:
            engine.last += 1
            engine.queue += [engine.last] * prompts
            engine.admission.entered(engine.last, "", 10, prompts)
        return found

    assert ask(SLOTS + 10) is None
    assert ask(11) is not None
    assert ask(10) is None
    assert ask(1) is not None
    engine = Engine(limits(max_waiting_requests=20))
    assert ask(100) is None
