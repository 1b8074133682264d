"""Fairness between tenants: equal shares under load, no credit from idleness, no idle slots."""

from __future__ import annotations

import random

import pytest
from support.scheduler.scheduler_harness import Engine, prompt, small
from support.scheduler.simulated_worker import token_bytes

from penstock.services.scheduler import fair
from penstock.services.scheduler.fair import DECODE_WEIGHT, PREFILL_WEIGHT, FairByTenant
from penstock.services.scheduler.limits import Limits

ROOM = Limits(
    num_blocks=800,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=200,
    vocab_size=100,
)


class Tenants:
    """An engine and its tenants; counts what each was served, on its own books."""

    def __init__(self, limits: Limits = ROOM) -> None:
        self.policy = FairByTenant()
        self.engine = Engine(limits, policy=self.policy, caching=False)
        self.tenant_of: dict[int, str] = {}

    def submit(self, tenant: str, length: int, output: int, count: int = 1) -> list[int]:
        ids = []
        for _ in range(count):
            request_id = len(self.tenant_of) + 1
            self.tenant_of[request_id] = tenant
            tokens = [request_id // 100, request_id % 100, *[1] * (length - 2)]
            self.engine.submit(request_id, tokens, max_tokens=output, tenant=tenant)
            ids.append(request_id)
        return ids

    def started(self) -> list[str]:
        """Tenants in the order in which their sequences got slots."""
        return [self.tenant_of[request_id] for request_id in self.engine.started]

    def served(self) -> dict[str, float]:
        """Weighted tokens: prompt positions of those that started, and tokens received."""
        served = dict.fromkeys(self.tenant_of.values(), 0.0)
        for (request_id, _), stream in self.engine.streams.items():
            if stream.received:
                prefill = PREFILL_WEIGHT * len(stream.prompt)
                decode = DECODE_WEIGHT * len(stream.received)
                served[self.tenant_of[request_id]] += prefill + decode
        return served


def test_a_flood_does_not_delay_another_tenants_request_past_the_next_free_slot() -> None:
    tenants = Tenants()
    tenants.submit("flood", 10, 5, count=100)
    for _ in range(3):
        tenants.engine.step()
    tenants.submit("light", 10, 5)
    waiting_before = len(tenants.started())
    tenants.engine.run()
    assert tenants.started()[waiting_before] == "light"
    assert tenants.started().count("flood") == 100


@pytest.mark.parametrize("examples", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_tenants_that_always_wait_get_the_same_service(examples: int) -> None:
    """The bound that the paper proves: the service of two backlogged tenants differs by no more
    than 2 max(w_p L, w_q M), with L the longest prompt and M the tokens of a full batch."""
    for seed in range(examples):
        serve_tenants_alike(random.Random(seed))


def serve_tenants_alike(rng: random.Random) -> None:
    tenants = Tenants()
    shapes = {name: (rng.randint(3, 20), rng.randint(2, 20)) for name in ("ann", "bob", "eve")}
    for name, (length, output) in shapes.items():
        tenants.submit(name, length, output, count=90)
    longest = max(length for length, _ in shapes.values())
    batch = ROOM.max_num_seqs * max(length + output for length, output in shapes.values())
    bound = 2 * max(PREFILL_WEIGHT * longest, DECODE_WEIGHT * batch)
    while True:
        for _ in range(10):
            tenants.engine.step()
        started = tenants.started()
        if any(started.count(name) == 90 for name in shapes):
            break
        served = tenants.served()
        assert max(served.values()) - min(served.values()) <= bound
    assert min(tenants.served().values()) > bound  # so it has said something


def test_idleness_earns_nothing() -> None:
    tenants = Tenants(small(max_num_seqs=1, num_blocks=40))
    tenants.submit("late", 10, 5)
    tenants.engine.run()
    tenants.submit("busy", 10, 5, count=30)
    for _ in range(60):
        tenants.engine.step()
    done = len(tenants.started())
    tenants.submit("late", 10, 5, count=10)
    tenants.engine.run()
    after = tenants.started()[done:]
    # Had it kept its small counter, all ten would have gone first.
    assert 4 <= after[:10].count("late") <= 6


def test_a_tenant_that_never_had_to_wait_is_no_worse_off_than_a_newcomer() -> None:
    tenants = Tenants(small(max_num_seqs=1, num_blocks=40))
    for _ in range(10):
        tenants.submit("regular", 10, 5)
        tenants.engine.run()
    for _ in range(5):
        tenants.submit("new", 10, 5)
        tenants.submit("regular", 10, 5)
    tenants.engine.run()
    after = tenants.started()[10:]
    assert 2 <= after[:5].count("new") <= 3


def test_a_new_tenant_starts_where_the_least_served_of_the_waiting_ones_is() -> None:
    tenants = Tenants(small(max_num_seqs=1, num_blocks=40))
    policy = tenants.policy
    tenants.submit("ann", 10, 5, count=5)
    tenants.submit("bob", 20, 10, count=5)
    for _ in range(20):
        tenants.engine.step()
    least = min(policy.lane_key("ann"), policy.lane_key("bob"))
    assert least > 0
    tenants.submit("eve", 10, 5)
    assert policy.lane_key("eve") == least


def test_whoever_is_alone_gets_the_whole_engine() -> None:
    tenants = Tenants()
    tenants.submit("rare", 4, 1)
    tenants.submit("only", 10, 20, count=8)
    tenants.engine.run()
    alone = Engine(ROOM, caching=False)
    for request_id in range(8):
        alone.submit(request_id, prompt(10), max_tokens=20)
    alone.run()
    assert len(tenants.engine.plans) <= len(alone.plans) + 2


def test_no_slot_stays_free_while_anyone_waits() -> None:
    rng = random.Random(5)
    tenants = Tenants(small(max_num_batched_tokens=400, num_blocks=200))
    engine = tenants.engine
    crowded = 0
    for _ in range(60):
        tenants.submit(rng.choice("abc"), rng.randint(3, 30), rng.randint(1, 20))
        for _ in range(rng.randint(0, 6)):
            if engine.plan() is not None:
                stats = engine.core.stats()
                assert stats.running == 4 or not stats.waiting
                crowded += stats.waiting > 0
            elif engine.answers:
                engine.deliver()
    assert crowded > 20
    engine.run()


def test_equal_tenants_take_turns_in_the_order_of_their_arrival() -> None:
    tenants = Tenants(small(max_num_seqs=1, num_blocks=40))
    for _ in range(3):
        for name in ("bob", "ann", "eve"):
            tenants.submit(name, 10, 5)
            tenants.engine.now += 1.0
    tenants.engine.run()
    assert tenants.started() == ["bob", "ann", "eve"] * 3


def test_the_latest_arrival_of_the_tenant_that_was_served_most_gives_way() -> None:
    limits = small(num_blocks=12, max_num_batched_tokens=60)
    engine = Engine(limits, policy="fair", caching=False)
    for request_id, tenant in ((1, "heavy"), (2, "heavy"), (3, "light")):
        engine.submit(request_id, prompt(8, 20 * request_id), max_tokens=12, tenant=tenant)
        engine.now += 1.0
    engine.run()
    assert engine.core.stats().counters.preemptions == 1
    (back,) = [new for plan in engine.plans if not plan.full for new in plan.added]
    assert back.tokens.startswith(token_bytes(prompt(8, 40)))
    for request_id in (1, 2, 3):
        engine.assert_finished(request_id)


def test_what_is_computed_anew_is_not_charged_twice() -> None:
    roomy, tight = (
        Engine(small(num_blocks=blocks, max_num_batched_tokens=60), policy="fair", caching=False)
        for blocks in (60, 9)
    )
    for engine in (roomy, tight):
        for request_id, tenant in ((1, "ann"), (2, "bob")):
            engine.submit(request_id, prompt(8, 20 * request_id), max_tokens=20, tenant=tenant)
        engine.run()
    assert tight.core.stats().counters.preemptions > 0
    policies = [engine.core._policy for engine in (roomy, tight)]
    for tenant in ("ann", "bob"):
        one, other = (policy.lane_key(tenant) for policy in policies)
        assert other == pytest.approx(one, abs=6 * DECODE_WEIGHT)  # tokens in flight at the time
        assert one == pytest.approx(8 * PREFILL_WEIGHT + 19 * DECODE_WEIGHT)


def test_the_tenants_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair, "MAX_TENANTS", 8)
    tenants = Tenants()
    for number in range(50):
        tenants.submit(f"tenant {number}", 5, 2)
        tenants.engine.step()
        assert len(tenants.policy._served) <= 8 + ROOM.max_num_seqs
    tenants.engine.run()


@pytest.mark.parametrize("weights", [(0.0, 1.0), (1.0, -1.0)])
def test_weights_that_would_charge_nothing_are_refused(weights: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        FairByTenant(*weights)
