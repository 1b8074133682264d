"""Models that sleep: their engines are stopped, and started again for the next request.

``residency.py`` decides who is awake. What is done here is to end the processes of an engine and to
start them; a model's tokenizers stay, and the router holds what waits for its engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from penstock.protocol.config.keep_alive import keep_alive_of
from penstock.protocol.config.process_fields import LaunchConfig
from penstock.protocol.process.metrics import Registry
from penstock.protocol.process.plain_structlog import Logger
from penstock.protocol.wire.messages.membership import (
    Capacity,
    Demand,
    Peer,
    Phase,
    Sleep,
    Sleeper,
)
from penstock.services.launcher.processes import Child
from penstock.services.launcher.residency import ASKED, AWAKE, KEEP_ALIVE, WANTED, Residency
from penstock.services.launcher.running_model import ModelEnd, RunningModel

MAX_FAILED_STARTS = 3
"""Processes of an engine that end while their model wakes, after which that has failed."""
RETRY_SECONDS = 30.0
"""A model that could not be woken is not tried again for so long."""
GUESSED_WAKE_SECONDS = 10.0
"""While nothing was measured."""
REST_SECONDS = 60.0
"""A worker that keeps its weights has left its device so long after its scheduler's end, or is
killed. The first time it pins memory of the host for all of them."""
FALL_SECONDS = 2.0
"""An engine without requests ends within about so long."""
_WORDS = {
    WANTED: "another model is wanted",
    KEEP_ALIVE: "nobody has used it (--keep-alive)",
    ASKED: "an administrator asked for it",
}


class Processes(Protocol):
    def add(self, children: Sequence[Child]) -> None: ...

    def remove(self, children: Sequence[Child]) -> None: ...


class Cluster(Protocol):
    def own(self) -> Mapping[int, Peer]: ...

    def demand(self, model: str) -> Demand:
        """What all frontends and the router have for a model."""
        ...

    def sleep(self, sleepers: Sequence[Sleeper]) -> None:
        """Tell all others which models sleep."""

    def serve(self, models: Sequence[str]) -> None:
        """Tell all others that these are served, though they may never have been ready."""

    def report(self, metrics: Registry) -> None: ...


class _Nap:
    """Where a model is between being awake and being awake again."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.end: ModelEnd | None = None
        """Its engines are being ended."""
        self.wake_s: float | None = None
        """Seconds that its last waking took."""
        self.prepared = False
        """Its engines were started ahead since it fell asleep."""
        self.failed_starts = 0
        """Since it began to wake."""
        self.reason = ""
        """Why it could not be woken."""


class Sleepers:
    """Puts models to sleep and wakes them. ``ModelSet`` tells it what ends and when to go on."""

    def __init__(
        self,
        models: Sequence[RunningModel],
        launch: LaunchConfig,
        folders: Mapping[str, Capacity],
        cluster: Cluster,
        log: Logger,
        now: float,
    ) -> None:
        """``models``: those that are asleep have been given that state. ``folders``: what is known
        of a model before an engine of it was ready, by name."""
        self.processes: Processes
        """To be set before the first ``tick``."""
        self._models = {model.name: model for model in models}
        self._naps = {name: _Nap(folders[name]) for name in self._models}
        asleep = [model.name for model in models if model.state == Sleep.ASLEEP]
        self._policy = Residency(
            [name for name in self._models if name not in asleep],
            asleep,
            launch.resident,
            keep_alive_of(list(self._models), launch.keep_alive),
            launch.min_awake_s,
            now,
        )
        self._keeps_workers = launch.sleep_level == 1
        self._prepared: tuple[str, ...] = ("scheduler", "worker") if launch.prepare_engines else ()
        """Which processes of models that sleep are started ahead. Where the workers stay, a model
        that wakes waits for its scheduler alone."""
        if self._keeps_workers and not self._prepared:
            self._prepared = ("scheduler",)
        self._drain_s = launch.drain_timeout_s
        self._startup_s = launch.startup_timeout_s
        self._cluster = cluster
        self._log = log
        self._metrics = Registry()
        self._began = now
        self._told: list[Sleeper] = []
        self._tell()

    def begin(self, now: float) -> None:
        """The server is ready: those that are awake took so long to start."""
        for model in self._models.values():
            if model.state == AWAKE:
                self._naps[model.name].wake_s = now - self._began
                self._policy.entered(model.name, AWAKE, now)
        self._cluster.serve(list(self._models))
        self._tell()

    def close(self) -> None:
        """The server goes down: models wake for what waits still, none because an administrator
        asked, and nothing is prepared."""
        self._prepared = ()
        for use in self._policy.models.values():
            use.asked_at = None

    # --- what administrators ask

    def wake(self, model: RunningModel, now: float) -> None:
        """Wake it when its turn comes, as for a request."""
        if model.state != AWAKE:
            self._policy.models[model.name].asked_at = now
            self._naps[model.name].reason = ""
            self._policy.models[model.name].not_before = 0.0
            self._tell()

    def sleep(self, model: RunningModel, now: float) -> None:
        """Let it fall asleep when what runs is finished; one that does not wake yet sleeps on."""
        self._policy.models[model.name].asked_at = None
        if model.state == AWAKE:
            self._fall(model, ASKED, now)

    # --- what the supervisor says

    def ended(
        self, model: RunningModel, child: Child, cause: str, *, excused: bool, now: float
    ) -> bool:
        """A process of a model has ended. Returns whether it is not to be started again."""
        if child not in model.engines or model.state == AWAKE:
            return False
        if model.state != Sleep.WAKING:
            return True
        nap = self._naps[model.name]
        nap.failed_starts += not excused
        if nap.failed_starts < MAX_FAILED_STARTS:
            return False
        self._fail(model, cause, now)
        return True

    def tick(self, now: float) -> None:
        """Go on. Call it a few times a second, and when a message of the router has come."""
        for name, use in self._policy.models.items():
            use.observe(self._cluster.demand(name), now)
        for model in self._models.values():
            nap = self._naps[model.name]
            if model.state == Sleep.FALLING and nap.end is not None:
                if self._is_down(model, nap, nap.end, now):
                    self._asleep(model, nap, now)
            elif model.state == Sleep.WAKING:
                self._look(model, nap, now)
            elif nap.reason and now >= self._policy.models[model.name].not_before:
                nap.reason = ""
                self._tell()
        decision = self._policy.decide(now)
        for name in decision.wake:
            self._wake(self._models[name], now)
        for name, cause in decision.sleep:
            self._fall(self._models[name], cause, now)
        if self._prepared:
            self._prepare()

    # --- states

    def _enter(self, model: RunningModel, state: str, now: float, not_before: float = 0.0) -> None:
        model.enter(state, now)
        self._policy.entered(model.name, state, now, not_before)
        self._tell()

    def _fall(self, model: RunningModel, cause: str, now: float) -> None:
        nap = self._naps[model.name]
        nap.capacity = self._said(model) or nap.capacity
        ending = [one for one in model.engines if not self._keeps(one)]
        nap.end = ModelEnd(ending, now, drain_s=self._drain_s, withdrawal_s=0.0)
        self._log.info(f"model {model.name} falls asleep: {_WORDS[cause]}")
        self._metrics.inc("model_sleeps_total", model.name, cause)
        self._enter(model, Sleep.FALLING, now)
        nap.end.step(now, 0)

    def _keeps(self, child: Child) -> bool:
        """Whether a process goes on living while its model sleeps."""
        return self._keeps_workers and child.service == "worker"

    def _is_down(self, model: RunningModel, nap: _Nap, end: ModelEnd, now: float) -> bool:
        """Whether nothing of a model that falls asleep is on its devices any more."""
        if not end.step(now, 0):
            return False
        own = self._cluster.own()
        staying = [child.pid for child in model.engines if child.alive]
        if all(pid in own and own[pid].phase == Phase.ASLEEP for pid in staying):
            return True
        if now - model.since > self._drain_s + REST_SECONDS:
            nap.end = ModelEnd(model.engines, now, drain_s=None)
        return False

    def _said(self, model: RunningModel) -> Capacity | None:
        """What its engines can do, of several the one that holds the longest sequence."""
        pids = {child.pid for child in model.engines if child.service == "scheduler"}
        own = self._cluster.own()
        found = [own[pid].capacity for pid in pids if pid in own]
        longest = max(found, key=lambda one: one.max_model_len, default=None)
        return longest if longest is not None and longest.max_model_len else None

    def _asleep(self, model: RunningModel, nap: _Nap, now: float) -> None:
        """All processes of its engines have ended, or have left their devices."""
        nap.end = None
        self.processes.remove([child for child in model.engines if not child.alive])
        failed = bool(nap.reason)
        if not failed:
            self._log.info(f"model {model.name} is asleep after {now - model.since:.1f} s")
        self._enter(model, Sleep.ASLEEP, now, now + RETRY_SECONDS if failed else 0.0)

    def _wake(self, model: RunningModel, now: float) -> None:
        nap, use = self._naps[model.name], self._policy.models[model.name]
        nap.failed_starts, nap.reason, nap.prepared = 0, "", False
        why = f"{use.held} waiting" if use.held else _WORDS[ASKED]
        since = now if use.wanted_since is None else use.wanted_since
        self._log.info(f"model {model.name} wakes: {why}", waited_s=round(now - since, 3))
        self._enter(model, Sleep.WAKING, now)
        prepared = [child for child in model.engines if child.held and child.alive]
        others = [child for child in model.engines if not child.alive]
        self.processes.remove(others)  # one may have ended while it was held
        for child in others:
            child.held = False
        self.processes.add(others)
        for child in prepared:
            child.release()

    def _prepare(self) -> None:
        """Start processes of models that sleep ahead, once each time, while nobody waits for one
        that falls asleep or wakes."""
        states = [model.state for model in self._models.values()]
        if Sleep.FALLING in states or Sleep.WAKING in states:
            return
        for model in self._models.values():
            nap = self._naps[model.name]
            if model.state != Sleep.ASLEEP or nap.prepared or nap.reason:
                continue
            nap.prepared = True
            missing = [child for child in model.engines if not child.alive]
            ended = [child for child in missing if child.service in self._prepared]
            for child in ended:
                child.held = True
            self.processes.add(ended)

    def _look(self, model: RunningModel, nap: _Nap, now: float) -> None:
        """Whether a model that wakes is awake, or takes too long."""
        lacking = model.lacking(self._cluster.own())
        if not lacking:
            nap.wake_s = now - model.since
            self._log.info(f"model {model.name} is awake after {nap.wake_s:.1f} s")
            self._metrics.inc("model_wakes_total", model.name, "awake")
            self._metrics.observe("model_wake_seconds", nap.wake_s, model.name)
            self._enter(model, AWAKE, now)
        elif now - model.since > self._startup_s:
            waited = f"not ready within {self._startup_s:g} s ({', '.join(lacking)}); allow more"
            self._fail(model, f"{waited} with --startup-timeout-s", now)

    def _fail(self, model: RunningModel, reason: str, now: float) -> None:
        nap = self._naps[model.name]
        nap.reason = reason
        nap.end = ModelEnd(model.engines, now, drain_s=None)
        self._policy.models[model.name].asked_at = None
        self._log.error(
            f"model {model.name} cannot be woken: {reason}; it is tried again when it is wanted "
            f"after {RETRY_SECONDS:g} s"
        )
        self._metrics.inc("model_wakes_total", model.name, "failed")
        self._enter(model, Sleep.FALLING, now)

    # --- what the others are told

    def reason(self, model: RunningModel) -> str:
        """Why it could not be woken."""
        return self._naps[model.name].reason

    def _tell(self) -> None:
        for model in self._models.values():
            self._metrics.set("model_awake", float(model.state == AWAKE), model.name)
        self._cluster.report(self._metrics)
        told = [self._sleeper(one) for one in self._models.values() if one.state != AWAKE]
        if told != self._told:
            self._told = told
            self._cluster.sleep(told)

    def _sleeper(self, model: RunningModel) -> Sleeper:
        nap = self._naps[model.name]
        measured = [one.wake_s for one in self._naps.values() if one.wake_s is not None]
        seconds = nap.wake_s or max(measured, default=GUESSED_WAKE_SECONDS)
        if nap.reason:
            seconds += RETRY_SECONDS
        elif model.state == Sleep.FALLING:
            seconds += FALL_SECONDS
        seconds = round(seconds, 3)
        return Sleeper(
            *(model.name, model.names[1:], model.state, nap.capacity),
            *(seconds, nap.reason[:500], self._keeps_workers),
        )
