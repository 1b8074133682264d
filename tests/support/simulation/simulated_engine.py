"""An engine on the simulated network: the real scheduler and worker services, core included.

They have the simulated network for a mailbox and the virtual clock for theirs. Below the worker's
service stands an executor in plain Python that refuses every plan which breaks a rule.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar
from unittest.mock import patch

import msgspec
from support.scheduler.simulated_worker import SimulatedWorker
from support.simulation.simulated_network import ROUTER, TICK, Node, World

from penstock.protocol.config import Config
from penstock.protocol.config.fields import (
    AdmissionConfig,
    CacheConfig,
    ClusterConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.protocol.process import service as service_module
from penstock.protocol.process.loop_service import LoopService
from penstock.protocol.process.participant import Participant
from penstock.protocol.tasks import Task
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.engine import Adapter, EngineSizes, StepShape
from penstock.protocol.wire.messages.membership import Peer, Role
from penstock.protocol.wire.messages.steps import SlotSampling, StepFailed, StepPlan, StepResult
from penstock.services.scheduler.limits import Limits
from penstock.services.scheduler.service import SchedulerService
from penstock.services.worker.executor import DeviceFailed
from penstock.services.worker.service import WorkerService

LOADING = 0.3
"""Seconds until a worker has its model, at most."""
TURN = 0.001
"""Seconds until a loop has read what has come and does its work, at most."""
MODEL = "/sim/model"
COLLECTIVE = 3.0
"""Seconds after which a rank ends that waits in a step for the others."""
LOOK = 0.002
"""Seconds between two looks whether the other ranks are as far."""
SOON = 0.1
"""A loop that would sleep for less is woken on time; for all that is later its ticks do."""

S = TypeVar("S", bound=LoopService)


LIMITS = Limits(
    num_blocks=256,
    block_size=4,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=200,
    vocab_size=1000,
)


@dataclass(frozen=True)
class EngineTraits:
    """What all engines of a world are like."""

    limits: Limits = LIMITS
    policy: str = "fcfs"
    caching: bool = True
    max_waiting: int = 4096
    step_seconds: float = 0.01
    token_seconds: float = 0.0001
    """What a token of prefill takes on top."""
    max_in_flight: int = 2
    """Steps that a worker launches before it waits for the oldest."""
    poison: int = -1
    """A step that computes this token raises."""
    not_a_number: int = -1
    """K, V and logits of this token, and of all that attend to it, are NaN."""
    early: float = 0.0
    """How often a grammar is not compiled when a token is due."""
    world_size: int = 1
    """Workers of an engine; they draw alike."""
    collective: bool = True
    """The ranks wait for each other in every step."""
    counts: bool = False
    """Rows bring none to ``limits.max_row_tokens`` tokens, not one each."""
    failing_steps: float = 0.0
    """How often a step raises for no reason."""
    broken_steps: float = 0.0
    """How often the device fails behind a step, which ends the worker."""
    kept_bytes: int = 0
    """Memory of a keeper for blocks; 0: there is none."""

    def with_limits(self, **changes: int) -> EngineTraits:
        return replace(self, limits=msgspec.structs.replace(self.limits, **changes))


class Log:
    """Takes what a service logs."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def __getattr__(self, level: str) -> Any:
        def say(text: str, **fields: object) -> None:
            world = self._node.world
            world.log.append(f"{world.now:.3f} {self._node.address} {level}: {text} {fields}")

        return say


class Beats:
    """In the place of the beat thread: the node beats by the virtual clock."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def now(self) -> None:
        self._node.world.after(0.0, self._node.beat)


def make_service(kind: type[S], config: Config, node: Node) -> S:
    """A service with its node for a mailbox."""
    with (
        patch.object(service_module, "open_mailbox", lambda *_, **__: node),
        patch.object(service_module.logs, "set_up", lambda *_: Log(node)),
        patch.object(service_module, "BeatThread", lambda *_: Beats(node)),
    ):
        return kind(config)


class EngineNode(Node):
    """One process of an engine."""

    def __init__(
        self, world: World, engine: str, traits: EngineTraits, rank: int = 0, role: Role = "both"
    ) -> None:
        self.engine = engine
        self.traits = traits
        self.rank = rank
        self.role = role
        self._turn_at: float | None = None
        super().__init__(world)

    def replacement(self) -> Node:
        return type(self)(self.world, self.engine, self.traits, self.rank, self.role)

    def config(self) -> Config:
        traits = self.traits
        return Config(
            model=ModelConfig(model=MODEL),
            device=DeviceConfig(device="null"),
            cluster=ClusterConfig(
                router=ROUTER,
                engine=self.engine,
                rank=self.rank,
                tensor_parallel_size=traits.world_size,
                max_local_prefill_length=0,
            ),
            cache=CacheConfig(
                enable_prefix_caching=traits.caching,
                kv_tier_memory_bytes=traits.kept_bytes or None,
            ),
            scheduler=SchedulerConfig(scheduling_policy=traits.policy, role=self.role),
            admission=AdmissionConfig(max_waiting_requests=traits.max_waiting),
        )

    def plan_turn(self, seconds: float) -> None:
        """The loop does its work in a moment, behind what comes until then."""
        at = self.world.now + seconds
        if self._turn_at is None or at < self._turn_at:
            self._turn_at = at
            self.world.after(seconds, lambda: self._turn(at))

    def _turn(self, at: float) -> None:
        if self._turn_at == at:
            self._turn_at = None
            if self.alive:
                self.turn()

    def go_on(self) -> None:
        super().go_on()
        self.plan_turn(0.0)

    def turn(self) -> None: ...


class SchedulerNode(EngineNode):
    service = "scheduler"

    def join(self) -> Participant:
        self._noted = (0, 0)
        self.scheduler = make_service(SchedulerService, self.config(), self)
        self.scheduler.start()
        return self.scheduler.participant

    @property
    def core(self) -> Any:
        return self.scheduler.core

    def send(self, address: str, message: Message) -> bool:
        if isinstance(message, StepPlan) and (message.epoch, message.step) > self._noted:
            self._noted = (message.epoch, message.step)
            note_whole(self.world, self.core, message)
        return super().send(address, message)

    def on_message(self, sender: int, message: Message) -> None:
        self.scheduler.on_message(sender, message, self.world.now)
        self.plan_turn(self.world.random.random() * TURN)

    def on_tick(self) -> None:
        self.scheduler.on_tick(self.world.now)
        self.plan_turn(0.0)

    def on_gone(self, gone: dict[int, Peer]) -> None:
        self.scheduler.on_gone(gone, self.world.now)

    def turn(self) -> None:
        now = self.world.now
        self.scheduler.work(now)
        if self.core is not None:
            self.core.check()
            patience = self.scheduler.patience(now)
            if patience < min(SOON, TICK):
                self.plan_turn(patience)

    def num_open(self) -> int:
        if self.core is None:
            return 0
        stats = self.core.stats()
        return stats.open_requests + stats.running + stats.waiting + stats.blocks_used

    def num_remembered(self) -> int:
        ledger = self.scheduler.ledger
        if ledger is None:
            return 0
        return len(ledger._tombstones) + len(ledger._taken_at)


def note_whole(world: World, core: Any, plan: StepPlan) -> None:
    """Remember the tokens of the sequences that a plan adds: whoever executes it can compare its
    prefix hits with them."""
    running = {s.slot: s for s in core._planner.batch.sequences.values()}
    world.whole[plan.epoch, plan.step] = {
        new.slot: running[new.slot].tokens.tolist() for new in plan.added
    }


class SimulatedExecutor:
    """Executes plans at once and tells their results when their time has passed."""

    device = "simulated"
    dtype = ""
    summary = ""
    account = None
    tasks: ClassVar[dict[str, Task]] = {}
    generates = True
    repeats = False
    labels: ClassVar[list[str]] = []
    adapters: ClassVar[list[Adapter]] = []
    described = ""
    draft_counts = None
    loader = None

    def __init__(self, node: WorkerNode) -> None:
        self._node = node
        self._world = node.world
        self._traits = node.traits
        limits = node.traits.limits
        self.capacity = EngineSizes(*msgspec.structs.astuple(limits))
        self.shape = StepShape()
        self.max_in_flight = node.traits.max_in_flight
        self.steps = 0
        self.failed = 0
        self._launched: deque[tuple[float, StepResult]] = deque()
        self._busy_until = 0.0
        self._draws = random.Random()
        """What differs from step to step, and not between ranks."""
        self._worker = self._begin(0)

    def _begin(self, epoch: int) -> SimulatedWorker:
        """A new epoch: nothing that lies in memory may be read any more."""
        traits = self._traits
        worker = SimulatedWorker(
            traits.limits, epoch, traits.poison, traits.not_a_number,
            is_early=self._is_early, token_seconds=traits.token_seconds,
            row_count=self._row_count if traits.counts else None,
        )  # fmt: skip
        if traits.kept_bytes:  # what one has computed others read
            worker._before = self._world.before
        return worker

    @property
    def memory(self) -> list[list[int | None]]:
        """Of K and V, block by block; a load may be the first that an epoch sees."""
        if self._worker.epoch != self._node.worker.epoch:
            self._worker = self._begin(self._node.worker.epoch)
        return self._worker._memory

    def complain(self, what: str) -> None:
        self._world.wrong.append(AssertionError(what))

    def _is_early(self, sampling: SlotSampling) -> bool:
        asked = sampling.adjustments
        if asked is None or asked.grammar is None:
            return False
        return self._draws.random() < self._traits.early

    def _row_count(self) -> int:
        return self._draws.randint(0, self._traits.limits.max_row_tokens)

    @property
    def in_flight(self) -> int:
        return len(self._launched)

    def reset(self) -> None:
        self._launched.clear()
        self._worker.drop_slots()

    def launch(self, plan: StepPlan) -> None:
        world, traits = self._world, self._traits
        if plan.epoch != self._worker.epoch:
            self._worker = self._begin(plan.epoch)
        self._draws.seed(plan.epoch << 32 | plan.step)
        if self._draws.random() < traits.failing_steps:
            self._worker.fail_steps[plan.step] = "a kernel was unlucky"
        whole = world.whole.get((plan.epoch, plan.step))
        try:
            answer = self._worker.run(plan, whole)
        except AssertionError as error:
            world.wrong.append(error)
            raise
        self.steps += 1
        if isinstance(answer, StepFailed):
            self.failed += 1
            world.failures += 1
            raise RuntimeError(answer.reason)
        seconds = answer.seconds + traits.step_seconds * world.random.uniform(0.5, 1.5)
        self._busy_until = max(self._busy_until, world.now) + seconds
        self._launched.append((self._busy_until, msgspec.structs.replace(answer, seconds=seconds)))
        step = (plan.epoch, plan.step)
        world.ranks_in[step] = world.ranks_in.get(step, 0) + 1
        self._node.plan_turn(self._busy_until - world.now)

    def finished(self, wait: bool = False) -> StepResult | None:
        world = self._world
        if not self._launched or not (wait or self._launched[0][0] <= world.now):
            return None
        due, result = self._launched[0]
        ranks = world.ranks_in[result.epoch, result.step]
        together = not self._traits.collective or ranks >= self._traits.world_size
        if not together and not wait:  # whoever waits would wait for them, too
            if world.now - due > COLLECTIVE:
                raise RuntimeError("the other ranks did not take part in a step")
            return None
        if world.random.random() < self._traits.broken_steps:
            raise RuntimeError("the device does not answer")
        self._launched.popleft()
        return result

    def next_at(self) -> float | None:
        """When to look whether a step is over."""
        if not self._launched:
            return None
        return max(self._launched[0][0], self._world.now + LOOK)

    def prepare(self) -> None: ...

    def improve(self, now: float, pause: float) -> bool:
        return False


class WorkerNode(EngineNode):
    service = "worker"

    def join(self) -> Participant:
        self.worker = make_service(WorkerService, self.config(), self)
        self.executor = SimulatedExecutor(self)
        self.world.after(self.world.random.random() * LOADING, self._loaded)
        return self.worker.participant

    def _loaded(self) -> None:
        if self.alive:
            self.worker._loaded = self.executor
            self.worker._finish_loading()

    def on_message(self, sender: int, message: Message) -> None:
        try:
            self.worker.on_message(sender, message, self.world.now)
        except DeviceFailed:
            self.plan_turn(0.0)
            return
        self._wake()

    def on_tick(self) -> None:
        self.worker.on_tick(self.world.now)

    def on_gone(self, gone: dict[int, Peer]) -> None:
        self.worker.on_gone(gone, self.world.now)

    def turn(self) -> None:
        try:
            self.worker.work(self.world.now)
        except DeviceFailed:
            self.world.die(self)
            return
        self._wake()

    def _wake(self) -> None:
        at = self.executor.next_at()
        if at is not None:
            self.plan_turn(at - self.world.now)
