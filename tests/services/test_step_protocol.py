"""A worker's process with a scheduler, and a scheduler's with a worker, that the test plays."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import msgspec
import pytest
from support.service_member import Join, Start, small_system

from penstock.protocol.wire.messages.engine import EngineSizes, LayerGroup
from penstock.protocol.wire.messages.membership import Capacity, Phase
from penstock.protocol.wire.messages.requests import (
    Accepted,
    ChoiceState,
    Enqueue,
    RequestHead,
    TokenWork,
    Unknown,
)
from penstock.protocol.wire.messages.steps import (
    Attach,
    Attached,
    Chunk,
    NewSlot,
    SlotSampling,
    StepFailed,
    StepPlan,
    StepResult,
)
from penstock.protocol.wire.messages.tokens import TokenBatch

PROMPT = array("i", [5, 6, 7]).tobytes()


@pytest.fixture
def system() -> Iterator[tuple[Start, Join]]:
    with small_system() as parts:
        yield parts


# --- the worker


class Engine:
    """A worker with the null engine, attached to a scheduler that is the test."""

    def __init__(self, start: Start, join: Join, *flags: str) -> None:
        start("worker", "--device", "null", *flags)
        self.scheduler = join("scheduler")
        self.address = self.scheduler.peer("worker").address
        self.attach(77)

    def attach(self, epoch: int) -> None:
        self.epoch = epoch
        self.scheduler.send(self.address, Attach(epoch, self.scheduler.mailbox.address))
        while self.scheduler.next(Attached).epoch != epoch:
            pass  # it is still that of an earlier test

    def plan(self, step: int, *, later: int = 0, full: bool = False) -> StepPlan:
        """A full plan begins one sequence; any other one lets it decode. later: epochs."""
        plan = StepPlan(self.epoch + later, step, full, [], [], [], [])
        if full:
            sampling = SlotSampling(0.0, 0, 1.0, 1)
            slot = NewSlot(0, PROMPT, 3, 0, [], sampling.packed())
            plan = msgspec.structs.replace(plan, added=[slot], chunks=[Chunk(0, 0, 3, True, [0])])
        return plan

    def send(self, plan: StepPlan) -> None:
        self.scheduler.send(self.address, plan)

    def result(self, plan: StepPlan) -> StepResult:
        self.send(plan)
        result = self.scheduler.next(StepResult)
        assert (result.epoch, result.step) == (plan.epoch, plan.step)
        return result


@pytest.fixture(scope="module")
def running() -> Iterator[Engine]:
    with small_system() as parts:
        yield Engine(*parts)


@pytest.fixture
def engine(running: Engine) -> Engine:
    """In an epoch of its own."""
    running.attach(running.epoch + 10)
    running.scheduler.received.clear()
    return running


def test_a_worker_drops_plans_of_another_epoch(engine: Engine) -> None:
    engine.result(engine.plan(1, full=True))
    engine.send(engine.plan(2, later=-1))
    engine.send(engine.plan(1, later=1, full=True))
    assert engine.scheduler.silence(StepResult)
    assert engine.scheduler.silence(StepFailed, 0.0)
    engine.result(engine.plan(2))


def test_a_worker_fails_a_plan_after_a_gap_and_goes_on_with_a_full_one(engine: Engine) -> None:
    engine.result(engine.plan(1, full=True))
    engine.send(engine.plan(3))
    failed = engine.scheduler.next(StepFailed)
    assert (failed.epoch, failed.step) == (engine.epoch, 3)
    assert failed.reason == "plan 3 came, plan 2 was due"
    engine.send(engine.plan(4))  # not full: of slots that are gone
    assert engine.scheduler.silence(StepResult)
    engine.result(engine.plan(5, full=True))


def test_a_worker_says_again_that_a_step_failed_when_its_scheduler_asks(engine: Engine) -> None:
    engine.result(engine.plan(1, full=True))
    engine.send(engine.plan(3))
    first = engine.scheduler.next(StepFailed)
    engine.send(engine.plan(2))  # sent again, as what is behind it: the failure was not heard
    assert engine.scheduler.next(StepFailed) == first
    engine.send(engine.plan(3))
    assert engine.scheduler.next(StepFailed) == first
    engine.result(engine.plan(4, full=True))


def test_a_step_whose_result_no_message_can_carry_has_failed(system: tuple[Start, Join]) -> None:
    slots, length, blocks = 200, 2047, 128
    engine = Engine(
        *system, "--max-num-seqs", str(slots), "--max-num-batched-tokens", str(slots * length),
        "--num-kv-blocks", str(slots * blocks),
    )  # fmt: skip
    prompt, sampling = bytes(4 * length), SlotSampling(0.0, 0, 1.0, 1)
    added, chunks = [], []
    for slot in range(slots):
        added.append(NewSlot(slot, prompt, length, 0, [], sampling.packed(), prompt_logprobs=20))
        own = [*range(slot * blocks, (slot + 1) * blocks)]
        chunks.append(Chunk(slot, 0, length, True, own))
    engine.send(StepPlan(engine.epoch, 1, True, [], added, [], chunks))
    failed = engine.scheduler.next(StepFailed)
    assert (failed.epoch, failed.step) == (engine.epoch, 1)
    assert "larger than a message may be" in failed.reason
    engine.send(engine.plan(1))  # sent again: it was not answered, but it has failed
    engine.send(engine.plan(2))
    assert engine.scheduler.silence(StepResult)
    engine.result(engine.plan(3, full=True))


def test_a_worker_answers_a_plan_that_comes_again_with_the_same_tokens(engine: Engine) -> None:
    engine.result(engine.plan(1, full=True))
    first = engine.result(engine.plan(2))
    again = engine.result(engine.plan(2))
    assert again == first
    assert engine.result(engine.plan(3)).tokens != b""


def test_a_worker_begins_a_new_epoch_without_slots_and_old_answers(engine: Engine) -> None:
    engine.result(engine.plan(1, full=True))
    engine.attach(engine.epoch + 1)
    engine.send(engine.plan(2))
    assert engine.scheduler.silence(StepResult)
    engine.result(engine.plan(1, full=True))


# --- the scheduler


class Frontier:
    """A scheduler whose worker and tokenizer are the test."""

    def __init__(self, start: Start, join: Join) -> None:
        start("scheduler")
        self.worker = join("worker", Capacity(32, 16, 4, 64, 64, 1000))
        self.tokenizer = join("tokenizer")
        self.address = self.worker.peer("scheduler").address
        attach = self.worker.next(Attach)
        self.epoch = attach.epoch
        other = EngineSizes(1, 16, 1, 16, 16, 10)
        self.to_scheduler(Attached(self.epoch + 1, 0, other))  # not of this epoch
        self.to_scheduler(Attached(self.epoch, 0, EngineSizes(32, 16, 4, 64, 64, 1000)))
        self.enqueue(1)

    def to_scheduler(self, message: Attached | StepResult | StepFailed) -> None:
        self.worker.send(self.address, message)

    def enqueue(self, number: int) -> None:
        sampling = SlotSampling(0.0, 0, 1.0, 1).packed()
        work = TokenWork(RequestHead(), PROMPT, sampling, [ChoiceState(0)], [], 3)
        body = msgspec.msgpack.encode(work)
        for _ in range(100):  # until it has taken ``Attached``
            own = self.tokenizer.mailbox.address
            self.tokenizer.send(self.address, Enqueue(number, 257, own, body))
            self.tokenizer.wait(0.1)
            if any(isinstance(m, Accepted) for m in self.tokenizer.received):
                return
        raise AssertionError("the scheduler takes nothing")

    def answer(self, plan: StepPlan, token: int, *, epoch: int | None = None) -> None:
        tokens = array("i", [token]).tobytes()
        epoch = self.epoch if epoch is None else epoch
        self.to_scheduler(StepResult(epoch, plan.step, tokens, [], 0.001))

    def tokens(self) -> list[int]:
        """What the tokenizer gets next."""
        batch = self.tokenizer.next(TokenBatch, 5.0)
        return array("i", batch.tokens).tolist()


@pytest.fixture
def frontier(system: tuple[Start, Join]) -> Frontier:
    return Frontier(*system)


def test_a_scheduler_drops_results_of_another_epoch(frontier: Frontier) -> None:
    plan = frontier.worker.next(StepPlan)
    assert (plan.epoch, plan.step, plan.full) == (frontier.epoch, 1, True)
    frontier.answer(plan, 99, epoch=frontier.epoch - 1)
    assert frontier.tokenizer.silence(TokenBatch)
    frontier.answer(plan, 7)
    assert frontier.tokens() == [7]


def test_a_scheduler_sends_a_plan_without_an_answer_again(frontier: Frontier) -> None:
    plan = frontier.worker.next(StepPlan)
    second = frontier.worker.next(StepPlan)  # made before the first one's result
    assert (second.step, second.full) == (2, False)
    assert frontier.worker.next(StepPlan, 5.0) == plan
    assert frontier.worker.next(StepPlan, 5.0) == second
    frontier.answer(plan, 7)
    frontier.answer(plan, 8)  # both were answered: the second answer counts for nothing
    frontier.answer(second, 9)
    assert [*frontier.tokens(), *frontier.tokens()] == [7, 9]


def test_a_scheduler_begins_anew_with_a_full_plan_after_a_failure(frontier: Frontier) -> None:
    plan = frontier.worker.next(StepPlan)
    second = frontier.worker.next(StepPlan)
    frontier.answer(plan, 7)
    assert frontier.tokens() == [7]
    frontier.worker.next(StepPlan)
    frontier.to_scheduler(StepFailed(frontier.epoch, second.step, "a gap"))
    again = frontier.worker.next(StepPlan)
    while not again.full:
        again = frontier.worker.next(StepPlan)
    [slot] = again.added
    assert slot.tokens == PROMPT + array("i", [7]).tobytes()
    frontier.answer(second, 66)  # a result of the life before
    frontier.answer(again, 8)
    assert frontier.tokens() == [8]


def test_an_old_failure_told_twice_does_not_keep_a_plan_from_being_sent_again(
    frontier: Frontier,
) -> None:
    plan = frontier.worker.next(StepPlan)
    frontier.to_scheduler(StepFailed(frontier.epoch, plan.step, "a fault"))
    again = frontier.worker.next(StepPlan)
    while not again.full:
        again = frontier.worker.next(StepPlan)
    frontier.to_scheduler(StepFailed(frontier.epoch, plan.step, "a fault"))
    frontier.to_scheduler(StepFailed(frontier.epoch - 1, again.step, "a fault long ago"))
    for _ in range(5):  # what was planned behind it comes first
        if frontier.worker.next(StepPlan, 5.0) == again:
            return
    raise AssertionError("the plan without an answer is not sent again")


def test_a_scheduler_takes_no_result_out_of_its_turn(frontier: Frontier) -> None:
    frontier.worker.next(StepPlan)
    second = frontier.worker.next(StepPlan)
    frontier.answer(second, 9)  # the first one's result is lost
    again = frontier.worker.next(StepPlan)
    assert again.full
    assert [slot.tokens for slot in again.added] == [PROMPT]
    assert frontier.tokenizer.silence(TokenBatch)


def test_a_scheduler_gives_back_what_its_next_worker_does_not_do(
    system: tuple[Start, Join],
) -> None:
    frontier = Frontier(*system)
    frontier.worker.next(StepPlan)
    frontier.worker.participant.goodbye()
    frontier.worker.mailbox.flush()
    second = system[1]("worker")
    epoch = second.next(Attach).epoch
    sizes = EngineSizes(32, 16, 4, 64, 64, 1000)
    second.send(frontier.address, Attached(epoch, 0, sizes, tasks=["embed"], generates=False))
    back = frontier.tokenizer.next(Unknown)
    assert (back.ids, back.attempts) == ([1], [257])
    assert second.silence(StepPlan)


def test_a_scheduler_says_why_it_cannot_use_a_worker(system: tuple[Start, Join]) -> None:
    start, join = system
    start("scheduler")
    worker = join("worker")
    address = worker.peer("scheduler").address
    epoch = worker.next(Attach).epoch

    def attached_with(*groups: LayerGroup) -> Attached:
        return Attached(epoch, 0, EngineSizes(32, 16, 4, 64, 64, 1000, groups=list(groups)))

    worker.send(address, attached_with(LayerGroup(), LayerGroup("state")))
    for _ in range(100):
        worker.wait(0.1)
        if "supports 'full', 'window', 'chunk'" in (note := worker.peer("scheduler").note):
            break
    assert "a group of layers of the kind 'state'" in note
    assert worker.peer("scheduler").phase == Phase.LOADING
    worker.send(address, attached_with(LayerGroup(), LayerGroup("window", 32)))
    for _ in range(100):
        worker.wait(0.1)
        if worker.peer("scheduler").phase == Phase.READY:
            return
    raise AssertionError("the scheduler refuses groups that it supports")
