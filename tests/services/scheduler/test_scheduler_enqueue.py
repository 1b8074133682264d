"""From an ``Enqueue`` message to the order of the queue: what the policies go by arrives."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from support.scheduler.scheduler_harness import prompt, small, token_work
from support.scheduler.simulated_worker import SimulatedWorker, token_list

from penstock.protocol.ownership.scheduler import SchedulerLedger
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.membership import Peer
from penstock.protocol.wire.messages.requests import Accepted, Enqueue, Rejected, TokenWork
from penstock.protocol.wire.messages.steps import StepResult
from penstock.services.scheduler.core import SchedulerCore
from penstock.services.scheduler.policy_choice import make_policy


@dataclass
class Nobody:
    """A membership without members."""

    router_address: str = "router"
    router_incarnation: int = 1
    peers: dict[int, Peer] = field(default_factory=dict)


class Admission:
    """A scheduler's ledger and core, fed with messages."""

    def __init__(self, policy: str) -> None:
        limits = small(max_num_seqs=1)
        self.core = SchedulerCore(limits, 1, make_policy(policy), True, 100)
        self.worker = SimulatedWorker(limits, 1)
        self.answers: list[Message] = []
        self.ledger = SchedulerLedger(Nobody(), self._send, self.core)

    def _send(self, address: str, message: Message) -> bool:
        self.answers.append(message)
        return True

    def enqueue(self, request_id: int, work: TokenWork | bytes) -> Message:
        body = work if isinstance(work, bytes) else msgspec.msgpack.encode(work)
        assert self.ledger.handle(5, Enqueue(request_id, 1, "t", body), 0.0)
        return self.answers[-1]

    def started(self) -> list[int]:
        """First tokens of the prompts, in the order in which they started; runs to the end."""
        first = []
        while (plan := self.core.plan(0.0)) is not None:
            first += [token_list(new.tokens)[0] for new in plan.added]
            answer = self.worker.execute(plan)
            assert isinstance(answer, StepResult)
            self.core.apply(answer, 0.0)
        return first


def test_the_priority_of_a_message_orders_the_queue() -> None:
    admission = Admission("priority")
    for request_id, priority in ((1, 0), (2, 2**31 - 1), (3, -(2**31)), (4, -1)):
        work = token_work(prompt(5, 10 * request_id), max_tokens=2, priority=priority)
        assert admission.enqueue(request_id, work) == Accepted(request_id, 1, max_tokens=2)
    assert admission.started() == [30, 40, 10, 20]


def test_the_tenant_of_a_message_orders_the_queue() -> None:
    admission = Admission("fair")
    for request_id, tenant in ((1, "ann"), (2, "ann"), (3, "ann"), (4, "bob")):
        work = token_work(prompt(5, 10 * request_id), max_tokens=2, tenant=tenant)
        admission.enqueue(request_id, work)
    assert admission.started() == [10, 40, 20, 30]


def test_the_cache_salt_of_a_message_separates_prefixes() -> None:
    admission = Admission("fcfs")
    for request_id, salt in ((1, "a"), (2, "b"), (3, "é" * 128), (4, "")):
        admission.enqueue(request_id, token_work(prompt(20), max_tokens=2, cache_salt=salt))
    admission.started()
    assert admission.core.stats().counters.prefix_hit_tokens == 0
    admission.enqueue(5, token_work(prompt(20), max_tokens=2, cache_salt="b"))
    admission.started()
    assert admission.core.stats().counters.prefix_hit_tokens == 16


def test_a_salt_or_priority_that_the_declaration_forbids_is_rejected_and_ends_nothing() -> None:
    admission = Admission("priority")
    for bad in (token_work([1], cache_salt="x" * 129), token_work([1], priority=2**31)):
        answer = admission.enqueue(1, bad)
        assert isinstance(answer, Rejected)
        assert answer.status == 500
    assert admission.enqueue(2, token_work([1])) == Accepted(2, 1, max_tokens=8)
