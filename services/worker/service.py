"""The worker's process: one device, one executor, one plan after another."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from functools import cached_property
from pathlib import Path

from penstock.protocol.config import Config
from penstock.protocol.model_info import fingerprint
from penstock.protocol.process.loop_service import LoopService
from penstock.protocol.process.metrics import Registry
from penstock.protocol.process.spans import SPANS
from penstock.protocol.process.trace import LAUNCH, SEND_RESULT, TRACE, WAIT
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.kv_tier import KVCopies, KVForget
from penstock.protocol.wire.messages.membership import Identity, Peer, Phase
from penstock.protocol.wire.messages.steps import Attach, StepFailed, StepPlan, StepResult
from penstock.services.worker import adapter_messages
from penstock.services.worker.attachment import Attachment
from penstock.services.worker.executor import DeviceFailed, Executor
from penstock.services.worker.executor_report import attached, capacity_of, say_loaded
from penstock.services.worker.kv_copies import Copies, copies_of, with_space
from penstock.services.worker.load_report import LoadReport, say_report
from penstock.services.worker.loading import LOAD_LIMIT_SECONDS, Load, load_executor
from penstock.services.worker.pauses import Pauses
from penstock.services.worker.rendezvous import Rendezvous, cannot_go_on, rendezvous_of
from penstock.services.worker.resting import Resting
from penstock.services.worker.slot_spans import SlotSpans
from penstock.services.worker.speculation.draft_metrics import report_drafts
from penstock.services.worker.step_limit import StepLimits

KEPT_ANSWERS = 8
COPIES_SECONDS = 0.001
"""Between two looks at copies of blocks, at adapters, or at weights of a model that falls asleep or
wakes, that are under way."""
LONG_STEP_SECONDS = 0.004
"""While blocks are copied, the end of a step that lasts longer may be seen ``COPIES_SECONDS``
later: the next step is on the device by then, and threads that copy need the interpreter."""
TURN_SECONDS = 0.05
"""A turn of the loop takes no further message after this time."""


class WorkerService(LoopService):
    """Executes the plans of its engine's scheduler. It outlives the scheduler: a new epoch
    drops all slots and keeps weights and memory."""

    name = "worker"

    def __init__(self, config: Config, load: Load = load_executor) -> None:
        super().__init__(config)
        self._load_executor = load
        self.metrics = Registry()
        self._slot_spans = SlotSpans()
        self._launch_seconds = self.metrics.counter("step_part_seconds_total", "launch")
        self.executor: Executor | None = None
        self.epoch = 0
        self.scheduler = ""
        self._launched = 0
        """The latest plan of this epoch that was put on the device."""
        self._expected = 0
        """Number of the next plan; 0 while only a full plan is accepted."""
        self._pauses = Pauses(self.status, self.log)
        self._limits = StepLimits()
        self._answers: deque[StepResult] = deque(maxlen=KEPT_ANSWERS)
        self._failed: StepFailed | None = None
        """What the scheduler was told last of a step that failed; it may not have heard it."""
        self._failure: BaseException | None = None
        self._loader: threading.Thread | None = None
        self._loaded: Executor | None = None
        self._load_report: LoadReport | None = None
        self._pending_attach: Attach | None = None
        self._copies: Copies | None = None
        self._step_seconds = 0.0
        """Of the step that was over last."""
        self._attachment = Attachment(self.participant, self._rendezvous)
        self._device_failed: DeviceFailed | None = None
        own = self.config.model.names()[0], self.config.cluster.engine
        self._resting = Resting(self.participant, *own, self.set_phase, self.log)

    @cached_property
    def _rendezvous(self) -> Rendezvous | None:
        """Where it meets the ranks that it computes with; ``None``: it computes alone."""
        return rendezvous_of(self.config, self.mailbox.address)

    def identity(self) -> Identity:
        cluster, folder = self.config.cluster, Path(self.config.model.model)
        return Identity(
            os.getpid(),
            socket.gethostname(),
            cluster.engine,
            cluster.rank,
            model=self.config.model.names()[0],
            fingerprint=fingerprint(folder),
            rendezvous="" if self._rendezvous is None else self._rendezvous.address,
        )

    def start(self) -> None:
        self.set_phase(Phase.LOADING, "starting")
        self.status.begin(LOAD_LIMIT_SECONDS)
        self._loader = threading.Thread(target=self._load, name="loader", daemon=True)
        self._loader.start()

    def _load(self) -> None:
        """Runs beside the message loop, so that the worker answers while it loads."""
        try:
            self._loaded = self._load_executor(self.config, self._progress, self._on_weights)
        except BaseException as error:
            self._failure = error

    def _progress(self, note: str) -> None:
        self.status.note = note

    def _on_weights(self, report: LoadReport) -> None:
        self._load_report = report
        say_report(report, self.log)

    def _finish_loading(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._loaded is None:
            return
        self.executor = self._loaded
        self._loader = None
        self._copies = copies_of(self.config, self.executor)
        say_loaded(self.executor, self.log)
        self.status.capacity = capacity_of(self.executor)
        self.metrics.set("engine_info", 1, self.executor.device, self.executor.dtype)
        self.status.done()
        self.set_phase(Phase.READY, str(self._load_report) if self._load_report else "")
        self._pauses.begin(time.monotonic())
        if self._pending_attach is not None:
            self._attach(self._pending_attach)

    def on_message(self, sender: int, message: Message, now: float) -> None:
        match message:
            case StepPlan():
                self._execute(message)
            case Attach():
                self._attach(message)
            case KVCopies() | KVForget() if self._copies is not None:
                turn = self.epoch, self._launched, self._expected
                if (answer := self._copies.answer(message, *turn)) is not None:
                    self._tell(answer)
            case _ if not adapter_messages.take(self.executor, message, self._tell):
                self.metrics.inc("dropped_messages_total", "unexpected")

    def _tell(self, message: Message) -> None:
        self.mailbox.send(self.scheduler, message)

    def _attach(self, message: Attach) -> None:
        self._attachment.check(message)
        if self.executor is None:
            self._pending_attach = message
        elif message.epoch == self.epoch:
            self._tell_attached(self.executor)
        elif not self._attachment.is_meeting:
            self._end_epoch(self.executor)
            self._attachment.begin(self.executor, message)
            self._look_if_met()

    def _look_if_met(self) -> None:
        """The epoch begins when all ranks are there."""
        if self.executor is None or (message := self._attachment.over()) is None:
            return
        self.epoch, self.scheduler = message.epoch, message.reply_to
        self._launched = self._expected = 0
        self._answers.clear()
        self._failed = None
        self._tell_attached(self.executor)

    def _tell_attached(self, executor: Executor) -> None:
        answer = attached(executor, self.epoch, self.config.cluster.rank)
        self._tell(with_space(answer, self._copies))

    def _execute(self, plan: StepPlan) -> None:
        """Execute a plan in its turn; after a failure or a gap only a full plan counts."""
        if self.executor is None or plan.epoch != self.epoch:
            self.metrics.inc("dropped_messages_total", "epoch")
            return
        if plan.step < self._expected:
            self._answer_again(plan.step)
            return
        if self._rendezvous is not None and plan.step != self._launched + 1:
            raise cannot_go_on(f"plan {plan.step} came, plan {self._launched + 1} was due")
        old = plan.step <= self._launched  # it came twice, and late: its blocks are others' by now
        if (not plan.full or old) and plan.step != self._expected:
            if self._expected:
                reason = f"plan {plan.step} came, plan {self._expected} was due"
                self._fail(plan, reason, missed=True)
            elif self.config.cluster.rank:
                self._still_failed(plan)
            elif self._failed is not None and plan.step <= self._failed.step:
                self.mailbox.send(self.scheduler, self._failed)  # the scheduler asks for it
            return
        self.status.begin(self._limits.begin(plan))
        if self.executor.in_flight == self.executor.max_in_flight:
            self._collect(self.executor, wait=True)
            if not plan.full and not self._expected:
                return  # what it builds on has failed
        began = time.monotonic_ns()
        self._launched = plan.step
        try:
            if self.faults:
                self._play_faults(plan)
            self.executor.launch(plan)
        except Exception as error:
            self.log.exception("step failed", step=plan.step)
            self._fail(plan, f"{type(error).__name__}: {error}")
            return
        ended = time.monotonic_ns()
        self._launch_seconds.value += (ended - began) * 1e-9
        if SPANS.on:
            self._slot_spans.launched(plan, began * 1e-9)
        if TRACE.on:
            TRACE.add(LAUNCH, began, plan.step, ended=ended)
        self._expected = plan.step + 1
        self._collect(self.executor)

    def _play_faults(self, plan: StepPlan) -> None:
        self.faults.at("step")
        for new in plan.added:
            self.faults.joined(new.tokens[: 4 * max(new.prompt_len - new.start, 0)])

    def _collect(self, executor: Executor, wait: bool = False) -> None:
        """Send the results of the steps that are over."""
        while (result := self._finished(executor, wait)) is not None:
            began = time.monotonic_ns() if TRACE.on else 0
            self._limits.over(result.seconds)
            self._step_seconds = result.seconds
            if SPANS.on:
                self._slot_spans.finished(result.step, time.monotonic())
            if self.config.cluster.rank:
                continue  # rank 0 speaks for all
            if not self.mailbox.send(self.scheduler, result):
                self._unsent(executor, result)
                return
            self._answers.append(result)
            if began:
                TRACE.add(SEND_RESULT, began, result.step)
        if not executor.in_flight:
            self.status.done()

    def _unsent(self, executor: Executor, result: StepResult) -> None:
        """A result that cannot be sent is lost, and sending it again would change nothing: its step
        has failed, and what is under way behind it is not awaited."""
        reason = (
            "its result could not be sent: it is larger than a message may be (logprobs of many "
            "prompts at once?), or the scheduler takes none"
        )
        self.log.error("result not sent", step=result.step, reason=reason)
        if self._rendezvous is not None:
            raise cannot_go_on(reason)
        self._reset(executor)
        self._expected = 0
        self._tell_failed(result.step, reason)

    def _finished(self, executor: Executor, wait: bool) -> StepResult | None:
        began = time.monotonic_ns() if wait and TRACE.on else 0
        try:
            return executor.finished(wait)
        except Exception as error:
            raise self._broken(error) from error
        finally:
            if began:
                TRACE.add(WAIT, began)

    def _end_epoch(self, executor: Executor) -> None:
        self.epoch, self.scheduler, self._pauses.improving = 0, "", False
        if self._copies is not None:
            self._copies.drop()
        self._reset(executor)
        adapter_messages.forget_others(executor)

    def _reset(self, executor: Executor) -> None:
        """Drop all slots and what is under way."""
        self._limits.drop()
        self._slot_spans.drop()
        try:
            executor.reset()
        except Exception as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> DeviceFailed:
        """A device that failed once answers nothing any more; ``work`` ends the process, and the
        next one may do better."""
        self._device_failed = DeviceFailed(f"{type(error).__name__}: {error}")
        return self._device_failed

    def _answer_again(self, step: int) -> None:
        """The scheduler asks for a step that is done: its answer was lost or is on its way."""
        for result in self._answers:
            if result.step == step:
                self.mailbox.send(self.scheduler, result)

    def _fail(self, plan: StepPlan, reason: str, missed: bool = False) -> None:
        if self._rendezvous is not None:
            raise cannot_go_on(f"step {plan.step} failed: {reason}")
        if self.executor is not None:
            self._collect(self.executor, wait=True)
            self._reset(self.executor)
        self._expected = 0
        self._tell_failed(plan.step, reason, missed)
        self.status.done()

    def _still_failed(self, plan: StepPlan) -> None:
        """A rank whose results nobody awaits is not asked again. So it answers every plan that it
        cannot execute: its failure may not have been heard, or the full plan behind it was lost. To
        a scheduler that knows of it, a failure from before the last full plan says nothing."""
        failed = self._failed
        reason = failed.reason if failed is not None else f"plan {plan.step} came before a full one"
        self._tell_failed(plan.step, reason, missed=True)

    def _tell_failed(self, step: int, reason: str, missed: bool = False) -> None:
        self._failed = StepFailed(self.epoch, step, reason, missed)
        self.mailbox.send(self.scheduler, self._failed)

    def pump(self) -> None:
        """Plans that are computed on the spot may keep the inbox full for ever: a turn ends in
        time for ticks, and for senders that the socket looks at only when it is polled."""
        now = time.monotonic()
        for sender, message in self.mailbox.drain():
            self._dispatch(sender, message, now)
            if time.monotonic() - now > TURN_SECONDS:
                break

    def work(self, now: float) -> None:
        if self._loader is not None:
            self._finish_loading()
        self._look_if_met()
        if self._resting.is_moving:
            self._look_resting()
        if self._device_failed is not None:  # in handling a message, which ends no process
            raise self._device_failed
        if self.executor is not None and self.executor.in_flight:
            self._collect(self.executor)
        adapter_messages.tell_loaded(self.executor, self._tell)
        if self._copies is not None and self._copies.active:
            for answer in self._copies.finished():
                self._tell(answer)
        if self._pauses.improving:
            self._pauses.improve(self.executor, self._expected, now)

    def patience(self, now: float) -> float:
        """Steps under way are awaited without sleeping: a wake-up costs as much as a short step."""
        copies = self._copies is not None and self._copies.active
        if self._pauses.improving:
            return 0.0
        if self.executor is not None and self.executor.in_flight:
            is_long = self._step_seconds > LONG_STEP_SECONDS
            return COPIES_SECONDS if copies and is_long else 0.0
        if copies or adapter_messages.loads(self.executor) or self._resting.is_moving:
            return COPIES_SECONDS
        waits = self._loader is not None or self._attachment.is_meeting
        return 0.02 if waits else super().patience(now)

    def on_gone(self, gone: dict[int, Peer], now: float) -> None:
        """When the scheduler is gone, its plans mean nothing any more."""
        self._attachment.peers_gone(gone)
        is_over = any(peer.address == self.scheduler for peer in gone.values())
        if is_over and self.executor is not None:
            self._end_epoch(self.executor)
        if not self._resting.is_moving:  # else ``work`` looks
            self._look_resting()

    def _look_resting(self) -> None:
        """Leave the device, or come back to it, as the model falls asleep and wakes."""
        before, self.executor = self.executor, None
        self.executor = self._resting.look(before, self._end_epoch)
        if before is not None and self.executor is None:
            self._pending_attach = None
        elif before is None and self.executor is not None and self._pending_attach is not None:
            self._attach(self._pending_attach)

    def on_tick(self, now: float) -> None:
        if self.executor is not None and self.executor.draft_counts is not None:
            report_drafts(self.executor.draft_counts, self.metrics)
        self.report(self.metrics)
        for refusal in self._attachment.complaints():
            self.log.error(refusal)
        if not self._attachment.is_meeting:
            copying = self._copies is not None and self._copies.active
            self._pauses.tidy(self.executor, self._expected, now, copying=copying)
            self._pauses.improve(self.executor, self._expected, now)


def run(config: Config, load: Load = load_executor) -> int:
    """Run a worker until SIGTERM. load: see ``load_executor``. Returns the exit code.

    Raises ``BadModelFolder`` when the checkpoint cannot be served.
    """
    return WorkerService(config, load).run()
