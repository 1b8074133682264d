"""The scheduler's process: one engine's queue and step plans."""

from __future__ import annotations

import os
import socket
import time

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.model_info import fingerprint
from penstock.protocol.ownership.scheduler import SchedulerLedger
from penstock.protocol.process import garbage
from penstock.protocol.process.loop_service import LoopService
from penstock.protocol.process.metrics import Counter, Registry
from penstock.protocol.process.trace import APPLY, HAND_OUT, PLAN, SEND_PLAN, TRACE
from penstock.protocol.trace_context import log_fields
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.administration import REQUEST_PROGRESS, Ask
from penstock.protocol.wire.messages.hand_overs import DecodeRoom
from penstock.protocol.wire.messages.membership import Demand, Identity, Peer, Phase
from penstock.protocol.wire.messages.requests import Enqueue, Rejected
from penstock.protocol.wire.messages.steps import Attached, StepFailed, StepPlan, StepResult
from penstock.services.scheduler.adapter_messages import AdapterMessages
from penstock.services.scheduler.admission import Offers
from penstock.services.scheduler.cache_shares import CacheShares
from penstock.services.scheduler.core import Batches, SchedulerCore
from penstock.services.scheduler.crash_only import CoreFailed, failure_in
from penstock.services.scheduler.endings import Ending
from penstock.services.scheduler.hand_overs import HandOvers, check_role
from penstock.services.scheduler.idle_check import IdleCheck
from penstock.services.scheduler.keeping import Keeping
from penstock.services.scheduler.limits import Limits, capacity_of
from penstock.services.scheduler.meters import EngineMeters
from penstock.services.scheduler.policy_choice import make_policy
from penstock.services.scheduler.progress import told
from penstock.services.scheduler.rate_line import RateLine
from penstock.services.scheduler.sent_plans import SentPlans
from penstock.services.scheduler.sequence import Request
from penstock.services.scheduler.take_overs import TakeOvers
from penstock.services.scheduler.worker_group import WorkerGroup

MOST_IN_FLIGHT = 4
UNSENT_SECONDS = 1.0
"""Seconds after a plan that could not be sent until the next one is made."""


class SchedulerService(LoopService):
    """Attaches its engine's worker, takes requests, sends plans, and hands tokens out."""

    name = "scheduler"
    fatal = (*LoopService.fatal, CoreFailed)

    def __init__(self, config: Config) -> None:
        try:
            self.policy = make_policy(config.scheduler.scheduling_policy)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        super().__init__(config)
        self.metrics = Registry()
        self._rate_line = RateLine(self.log.info)
        self.core: SchedulerCore | None = None
        self.ledger: SchedulerLedger | None = None
        self.group = WorkerGroup(
            config.cluster.world_size,
            self.mailbox.address,
            self.mailbox.send,
            (self.mailbox.incarnation & 0x7FFF_FFFF) << 16,
            self.log,
        )
        self._answers: list[StepResult | StepFailed] = []
        self._failed_beside: list[StepFailed] = []
        """Failures of ranks other than the first, whose results for older steps may come later."""
        self._plans = SentPlans(self.group.send)
        self._plan_at = 0.0
        self._idle_check = IdleCheck()
        self._adapters = AdapterMessages(self, config.cluster.world_size)
        self._model = config.model.names()[0]
        self._keeping: Keeping | None = None
        """Blocks outside of KV memory; ``None``: there are none."""
        self._hand_overs: HandOvers | None = None
        """Of a prefill engine."""
        self._take_overs: TakeOvers | None = None
        """Of any other whose blocks are kept."""
        self._meters = EngineMeters(self.metrics, self._model)

    def identity(self) -> Identity:
        names = self.config.model.names()
        return Identity(
            os.getpid(),
            socket.gethostname(),
            self.config.cluster.engine,
            model=names[0],
            aliases=names[1:],
            fingerprint=fingerprint(self.config.model.model),
            role=self.config.scheduler.role,
        )

    def start(self) -> None:
        self.set_phase(Phase.LOADING, "waiting for a worker")

    # --- the worker

    def _find_workers(self, now: float) -> None:
        """Attach the engine's workers; ask again until all have answered."""
        if self.group.attached:
            return
        engine = self.config.cluster.engine
        found = self.participant.of("worker", model=self._model)
        workers = [peer for peer in found if peer.identity.engine == engine]
        self.group.look(workers, now)
        if self.group.note:
            self.status.note = self.group.note

    def _on_attached(self, sender: int, message: Attached, now: float) -> None:
        whole = self.group.take(sender, message)
        if whole is None:
            return
        check_role(self.config.scheduler.role, whole)
        limits = Limits.of(whole.sizes)
        capacity = capacity_of(whole, limits, self.config.model.model)
        loaded = self._adapters.attached(whole, now)
        offers = Offers(capacity.done, loaded, whole.places, whole.resident, whole.repeats)
        if self.core is None:
            self._begin(whole, limits, offers, now)
        else:
            if self._keeping is not None:
                self._keeping.attached(whole, now)
            self._hand_over_others(self.core, offers)
            self._hand_out(self.core.restart(self.group.epoch, limits, offers))
        self.status.capacity = capacity
        self._look_if_ready(now)

    def _begin(self, whole: Attached, limits: Limits, offers: Offers, now: float) -> None:
        """The first workers are there: make what schedules for them."""
        config = self.config
        core = self.core = SchedulerCore(
            limits,
            self.group.epoch,
            self.policy,
            config.cache.enable_prefix_caching,
            config.admission.max_waiting_requests,
            most_in_flight=MOST_IN_FLIGHT,
            max_waiting_tokens=config.admission.max_waiting_tokens,
            shape=whole.shape,
            num_ranks=config.cluster.world_size,
            engine=config.cluster.engine,
            offers=offers,
            shares=CacheShares(config.cache.retained_cache_share, config.cache.tenant_cache_share),
        )
        core.follow_faults(self._on_fault)
        if whole.kv_space and config.cache.has_tiers:
            self._keeping = Keeping(self, core, whole, self.group, now)
        if self._keeping is not None and config.scheduler.role == "prefill":
            self._hand_overs = HandOvers(self, self._keeping.tier, core.prefill_budget)
            self._meters.follow(core, self._hand_overs.had_first_token)
        else:
            self._meters.follow(core)
            if self._keeping is not None:
                self._take_overs = TakeOvers(self, core)
        self.ledger = SchedulerLedger(self.participant, self.mailbox.send, core)
        garbage.settle()

    def _look_if_ready(self, now: float) -> None:
        """Take requests once the worker is there and it is known which blocks are kept."""
        if not self.group.attached or self._draining_since is not None:
            return
        if self._keeping is not None and self._keeping.awaits_keeper(now):
            self.status.note = "waiting for the keeper"
        elif self.status.phase != Phase.READY:
            self.set_phase(Phase.READY)

    def _hand_over_others(self, core: SchedulerCore, offers: Offers) -> None:
        """Give back what the next worker does not do: another engine may, or one to come."""
        if self.ledger is not None and (others := core.not_done_by(offers)):
            self.log.warning(
                f"the next worker does only {', '.join(offers.tasks or ())} and has "
                f"{len(offers.adapters or ())} adapters; {len(others)} open requests for other "
                "tasks or adapters go back to find another engine"
            )
            self.ledger.hand_over(frozenset(others))

    def _on_fault(self, request: Request, ending: Ending) -> None:
        self.log.warning("a request failed", reason=ending.message, **log_fields(request.head))

    def on_gone(self, gone: dict[int, Peer], now: float) -> None:
        if self.ledger is not None:
            self.ledger.peers_gone(gone)
        if self._keeping is not None:
            self._keeping.peers_gone(gone)
        if name := self.group.lost(gone):
            self._plans.clear()
            self._answers.clear()
            self._failed_beside.clear()
            if self._draining_since is None:
                self.set_phase(Phase.LOADING, "waiting for a worker")
            if self.core is not None:
                self._hand_out(self.core.worker_gone())
            if self.ledger is not None and self._another_is_ready():
                self.log.warning(f"the {name} is gone; its requests go to another engine")
                self.ledger.hand_over()
            else:
                self.log.warning(f"the {name} is gone; its requests wait for the next one")
                if self.ledger is not None:
                    self.ledger.tell_continued()
        self._find_workers(now)  # a stream's pause would have the time until the next tick in it

    def _another_is_ready(self) -> bool:
        """Whether another engine of the model could take this one's requests."""
        engines = self.participant.of("scheduler", ready_only=True, model=self._model)
        return any(peer.identity.engine != self.config.cluster.engine for peer in engines)

    # --- messages

    def on_message(self, sender: int, message: Message, now: float) -> None:
        match message:
            case StepResult() | StepFailed():
                if self.group.is_first(sender):
                    self._answers.append(message)
                elif isinstance(message, StepFailed) and self.group.has(sender):
                    self._failed_beside.append(message)
            case Attached():
                self._on_attached(sender, message, now)
            case Ask() if message.what == REQUEST_PROGRESS:
                progress = None if self.core is None else self.core.progress
                self.mailbox.send(message.reply_to, told(message, progress))
            case Ask():
                takes = self.group.attached and self._draining_since is None
                core = self.core if takes else None
                self.mailbox.send(message.reply_to, self._adapters.asked(message, core, now))
            case Enqueue() if self.ledger is None or (
                not self.group.attached and self._another_is_ready()
            ):
                self.mailbox.send(message.reply_to, _not_ready(message))
            case DecodeRoom():
                if self._hand_overs is not None:
                    self._hand_overs.told(sender, message)
            case _ if self._adapters.handle(sender, message, now):
                pass
            case _ if self._keeping is not None and self._keeping.handle(sender, message, now):
                self._look_if_ready(now)
            case _:
                if self.ledger is None or not self.ledger.handle(sender, message, now):
                    self.metrics.inc("dropped_messages_total", "unexpected")

    # --- steps

    def patience(self, now: float) -> float:
        """Seconds until a plan that is held back is due; a wait takes whole milliseconds."""
        held = self.core.held_for(now) if self.core is not None else 0.0
        return max(held, 0.001) if held else super().patience(now)

    def work(self, now: float) -> None:
        try:
            self._work(now)
        except CoreFailed:
            raise
        except Exception as error:
            raise failure_in("a step", error) from error

    def _work(self, now: float) -> None:
        """Answers in, next plans out, then the tokens: the worker never waits for us."""
        core = self.core
        if core is None:
            return
        self.status.load = core.open_sequences  # a beat may be due at any moment
        if not self.group.attached:
            return
        meters = self._meters
        batches: list[Batches] = []
        answers, self._answers = self._answers, []
        if self._failed_beside:
            answers += self._take_failed_beside(core, len(answers))
        for answer in answers:
            if isinstance(answer, StepResult):
                began = time.monotonic_ns()
                batches.append(core.apply(answer, now))
                _add_part(meters.take, APPLY, began, answer.step)
            else:
                failed = core.counters.failed_steps
                batches.append(core.fail(answer, now))
                if core.counters.failed_steps != failed:  # and no other rank has said it before
                    self.log.warning("step failed", step=answer.step, reason=answer.reason)
            if answer.epoch == core.epoch:
                self._plans.answered(answer.step, now)
            if not core.awaits_results:
                self._plans.clear()
        while now >= self._plan_at:
            began = time.monotonic_ns()
            if (plan := core.plan(now)) is None:
                break
            began = _add_part(meters.plan, PLAN, began, plan.step)
            self.faults.at("step")
            if self._keeping is not None:
                self._keeping.send()
            if not self._plans.send(plan, now):
                batches.append(self._unsent(core, plan, now))
            _add_part(meters.send, SEND_PLAN, began, plan.step)
        if self._keeping is not None:
            self._keeping.send()
        self._adapters.send(core)
        if ended := core.drain():
            batches.append(ended)
        for batch in batches:
            began = time.monotonic_ns()
            self._hand_out(batch)
            _add_part(meters.hand_out, HAND_OUT, began, len(batch))
        if self._hand_overs is not None and self.ledger is not None:
            self._hand_overs.send(self.ledger, now)  # behind their tokens

    def _take_failed_beside(self, core: SchedulerCore, answered: int) -> list[StepFailed]:
        """Failures of other ranks whose turn it is when so many more steps are answered: before
        that, whoever was in the older steps would be blamed, or nobody."""
        due = core.oldest_unanswered + answered
        ready = [failed for failed in self._failed_beside if failed.step <= due]
        self._failed_beside = [failed for failed in self._failed_beside if failed.step > due]
        return ready

    def _hand_out(self, batches: Batches) -> None:
        for owner, batch in batches:
            self.mailbox.send(owner, batch)

    def _unsent(self, core: SchedulerCore, plan: StepPlan, now: float) -> Batches:
        """A plan that cannot be sent has failed: all that ran goes back to waiting, what it took in
        is retried alone, and the plan is not made again as it was."""
        reason = (
            "its plan could not be sent to the worker: it is larger than a message may be, or the "
            "worker takes none"
        )
        self.log.error("plan not sent", step=plan.step, added=len(plan.added), reason=reason)
        self._plans.clear()
        self._plan_at = now + UNSENT_SECONDS
        return core.fail(StepFailed(self.group.epoch, plan.step, reason), now)

    def on_tick(self, now: float) -> None:
        self._find_workers(now)
        self._plans.resend(now)
        if self.core is not None:
            self._adapters.tick(self.core, now, self.metrics)
        if self.ledger is not None and self.core is not None:
            if not self.group.attached and not self.drained() and self._another_is_ready():
                self.ledger.hand_over()
            self.ledger.tick(now)
            self._hand_out(self.core.expire(now))
            self._report(self.core, now)
            if self._keeping is not None:
                self._keeping.tick(now, self.metrics)
                if self._hand_overs is not None:
                    self._hand_overs.tick(self.metrics)
                self._look_if_ready(now)
            if self._take_overs is not None and self.group.attached:
                self._take_overs.tick(self.ledger, self.metrics, now)
            self._idle_check.tick(self.core, now)
            usable = self.core.usable_slots(now) if self.group.attached else 0
            self.status.demands = [Demand(slots=usable, model=self._model)]
            if (prefixes := self.core.prefixes) is not None:
                prefixes.tell(bool(self.participant.of("scheduler", model=self._model)))
                self.status.prefixes = prefixes.report(self.participant.known_prefixes)
        self.report(self.metrics)

    def _report(self, core: SchedulerCore, now: float) -> None:
        stats = core.stats()
        self._rate_line.look(stats, now)
        self._meters.report(stats, core.queue_age(now))

    def on_drain(self) -> None:
        if self.ledger is not None:
            self.ledger.draining = True

    def drained(self) -> bool:
        return self.core is None or not self.core.stats().open_requests


def _add_part(part: Counter, name: int, began: int, number: int) -> int:
    """Count a part of a step that is over now, also for a recording; returns when that is."""
    ended = time.monotonic_ns()
    part.value += (ended - began) * 1e-9
    if TRACE.on:
        TRACE.add(name, began, number, ended=ended)
    return ended


def _not_ready(message: Enqueue) -> Rejected:
    return Rejected(
        message.id,
        message.attempt,
        503,
        "overloaded_error",
        "the engine is still loading; try again",
        retry_after=1.0,
        retry_elsewhere=True,
    )


def run(config: Config) -> int:
    """Run a scheduler until SIGTERM. Returns the exit code."""
    return SchedulerService(config).run()
