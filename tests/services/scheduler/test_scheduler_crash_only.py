"""A fault inside the core, a policy's included, ends the process; it is never passed over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support.scheduler.scheduler_harness import Engine, prompt, small, token_work

from penstock.protocol.ownership.scheduler import SchedulerLedger
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.requests import Accepted, Enqueue, Rejected
from penstock.services.scheduler.crash_only import CoreFailed
from penstock.services.scheduler.idle_check import IdleCheck
from penstock.services.scheduler.policy import FirstComeFirstServed

POISON = "poison"
OF_ADDING = ("lane", "on_lane_opened", "key")
OF_STEPS = ("lane_key", "on_prefill", "on_decode", "on_finished")


class Brittle(FirstComeFirstServed):
    """One of its methods raises for the tenant ``POISON``."""

    def __init__(self, broken: str) -> None:
        def fails(subject: Any, *others: object) -> Any:
            if POISON in str(getattr(getattr(subject, "request", subject), "tenant", subject)):
                raise KeyError(f"{broken} has a bug")
            return working(subject, *others)

        working = getattr(self, broken)
        setattr(self, broken, fails)

    def lane(self, request: Any) -> str:
        return str(request.head.tenant)


def engine_with(policy: FirstComeFirstServed) -> Engine:
    engine = Engine(small(), policy=policy)
    engine.submit(1, prompt(5), max_tokens=8)
    engine.step()
    return engine


@pytest.mark.parametrize("broken", OF_ADDING)
def test_a_request_that_the_policy_cannot_place_is_not_registered(broken: str) -> None:
    engine = engine_with(Brittle(broken))
    with pytest.raises(CoreFailed, match=f"core failed in add: KeyError: '{broken} has a bug'"):
        engine.submit(2, prompt(4), n=3, tenant=POISON)
    assert engine.core.holder(2) is None
    engine.core.check()
    assert engine.core.stats().waiting == 0


@pytest.mark.parametrize("broken", OF_STEPS)
def test_a_policy_that_fails_in_a_step_is_heard_of(broken: str) -> None:
    policy = Brittle(broken)
    if broken == "on_decode":
        policy.on_decode = lambda decoding: {}[POISON]  # type: ignore[method-assign]
    engine = Engine(small(), policy=policy)

    def request() -> None:
        engine.submit(2, prompt(4), max_tokens=2, tenant=POISON)
        engine.run()

    with pytest.raises((CoreFailed, KeyError)):
        request()


def test_the_request_that_a_core_fails_on_is_answered_before_the_process_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent: list[tuple[str, Message]] = []
    engine = engine_with(Brittle("key"))
    members: Any = SimpleNamespace(router_address="router", peers={})

    def send(address: str, message: Message) -> bool:
        sent.append((address, message))
        return True

    ledger = SchedulerLedger(members, send, engine.core)

    def enqueue(number: int, tenant: str) -> None:
        work = token_work(prompt(4), tenant=tenant)
        head = msgspec.structs.replace(work.head, request_id=f"req-{number}")
        work = msgspec.msgpack.encode(msgspec.structs.replace(work, head=head))
        ledger.handle(5, Enqueue(number, 1, "tokenizer", work), 0.0)

    enqueue(3, "fine")
    with pytest.raises(CoreFailed):
        enqueue(4, POISON)
    assert [getattr(line, "id", "") for line in caplog.records] == ["req-4"]
    ((_, accepted), (address, rejected)) = sent
    assert accepted == Accepted(3, 1, max_tokens=8)
    assert isinstance(rejected, Rejected)
    assert (address, rejected.id, rejected.status, rejected.retry_elsewhere) == (
        "tokenizer", 4, 500, False,
    )  # fmt: skip


def test_counts_are_compared_once_in_each_pause_behind_some_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_with(FirstComeFirstServed())
    checked: list[float] = []
    monkeypatch.setattr(engine.core, "check", lambda: checked.append(engine.now))
    check = IdleCheck()

    def wait(seconds: int) -> None:
        for _ in range(4 * seconds):
            engine.now += 0.25
            check.tick(engine.core, engine.now)

    wait(10)
    assert not checked  # a request is open
    checked.clear()
    engine.run()
    checked.clear()
    wait(1)
    assert not checked
    wait(100)
    assert len(checked) == 1
    engine.submit(2, prompt(5), max_tokens=3)
    engine.run()
    checked.clear()
    wait(10)
    assert len(checked) == 1


def test_counts_that_contradict_each_other_are_a_fault_of_the_core() -> None:
    engine = engine_with(FirstComeFirstServed())
    assert not engine.core.idle
    engine.run()
    assert engine.core.idle
    engine.core.check()
    engine.core._planner.kv.blocks._ref_counts[3] += 1
    with pytest.raises(CoreFailed, match=r"in check: RuntimeError: blocks with wrong reference"):
        engine.core.check()
