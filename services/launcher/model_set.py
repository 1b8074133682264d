"""The models of a server: those that it was started with, and those that administrators load and
unload, put to sleep and wake while it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.config.complete import AnotherModel
from penstock.protocol.model_info import BadModelFolder
from penstock.protocol.process.plain_structlog import Logger
from penstock.protocol.shown_values import show
from penstock.protocol.wire.messages.administration import (
    LOAD_MODEL,
    MODEL_STATES,
    SLEEP_MODEL,
    UNLOAD_MODEL,
    WAKE_MODEL,
    Ask,
    LoadModel,
    ModelAnswer,
    ModelState,
    Told,
)
from penstock.protocol.wire.messages.membership import Peer, Sleep
from penstock.services.launcher.children import ServerChildren
from penstock.services.launcher.folder_capacity import capacity_of_folder
from penstock.services.launcher.model_folder import FolderRefused, find_folder
from penstock.services.launcher.processes import Child
from penstock.services.launcher.running_model import (
    DRAINING,
    FAILED,
    LOADING,
    READY,
    RunningModel,
)
from penstock.services.launcher.sleepers import Cluster as SleepersCluster
from penstock.services.launcher.sleepers import Processes, Sleepers
from penstock.services.launcher.spares import Spares

MAX_MODELS = 64
"""Models that one server runs, at most."""
MAX_FAILED = 16
"""Failed loads that are remembered; the oldest are forgotten."""
MAX_NAME = 256
"""Characters of a served name."""


class ModelRefused(Exception):
    """What is asked for is not done. ``status`` is that of the HTTP answer."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Cluster(SleepersCluster, Protocol):
    """What the launcher sees and says as a member of its server."""

    def everybody(self) -> Sequence[Peer]: ...

    def open_requests(self, model: str) -> int: ...

    def unload(self, models: Sequence[str]) -> None: ...


class Making(Protocol):
    """What a new model is made with."""

    def configure(self, another: AnotherModel, running: list[Config]) -> Config:
        """Raises ``ConfigError`` and ``BadModelFolder``."""
        ...

    def children(self, config: Config, place: int) -> Sequence[Child]:
        """``place``: how many models there were before."""
        ...

    def changed(self, models: Sequence[RunningModel]) -> None:
        """These are the models that now serve."""


class ModelSet:
    """Loads and unloads. The supervisor tells it what ends and asks it to go on (``tick``)."""

    def __init__(
        self,
        configs: Sequence[Config],
        children: ServerChildren,
        making: Making,
        cluster: Cluster,
        log: Logger,
        now: float,
    ) -> None:
        """``configs``, ``children``: of the models that the server is started with. Raises
        ``BadModelFolder``."""
        self.processes: Processes
        """To be set before the first ``tick``."""
        launch = configs[0].launch
        self._dirs = launch.model_dirs
        self._drain_s = launch.drain_timeout_s
        self._startup_s = launch.startup_timeout_s
        self._making = making
        self._cluster = cluster
        self._log = log
        self._place = len(configs)
        self._models = [
            RunningModel(config, own.all, state, now)
            for config, own, state in zip(configs, children.models, _at_start(configs), strict=True)
        ]
        self._sleepers: Sleepers | None = None
        if launch.may_sleep:
            known = {one.model.names()[0]: capacity_of_folder(one) for one in configs}
            self._sleepers = Sleepers(self._models, launch, known, cluster, log, now)
        self._spares: Spares | None = None
        spares = launch.prepare_engines and configs[0].loading.hold_weights
        if spares and launch.sleep_level == 2:  # else a worker that sleeps is what is prepared
            self._spares = Spares()
        self._is_ready = self._is_closed = False

    @property
    def may_sleep(self) -> bool:
        return self._sleepers is not None

    @property
    def asleep(self) -> list[Child]:
        """Processes that are not to be started with the server."""
        sleeping = [model for model in self._models if model.state == Sleep.ASLEEP]
        return [child for model in sleeping for child in model.engines]

    # --- what administrators ask

    def answer(self, asked: Ask, now: float) -> Told:
        """The answer to a question of a frontend; empty where it is none of these."""
        try:
            models = self._asked(asked, now)
            answer = None if models is None else ModelAnswer(models)
        except ModelRefused as refusal:
            answer = ModelAnswer([], refusal.status, refusal.code, str(refusal))
        return Told(asked.number, msgspec.msgpack.encode(answer) if answer is not None else b"")

    def _asked(self, asked: Ask, now: float) -> list[ModelState] | None:
        if asked.what == MODEL_STATES:
            return [self._told(model, now) for model in self._models]
        if asked.what in (SLEEP_MODEL, WAKE_MODEL):
            return self._sleep_or_wake(asked, now)
        if asked.what not in (LOAD_MODEL, UNLOAD_MODEL):
            return None
        if not self._dirs:
            raise ModelRefused(
                403,
                "model_loading_off",
                "this server was started without --model-dirs, the folders below which models may "
                "be loaded, so models can be neither loaded nor unloaded",
            )
        self._check_ready()
        try:
            if asked.what == UNLOAD_MODEL:
                return self._unload(asked.about.decode(), now)
            return self._load(msgspec.msgpack.decode(asked.about, type=LoadModel), now)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ModelRefused(400, "bad_question", str(error)) from None

    def _check_ready(self) -> None:
        if self._is_closed:
            raise ModelRefused(503, "not_ready", "the server is shutting down")
        if not self._is_ready:
            message = "the server is still starting; try again when /ready answers 200"
            raise ModelRefused(503, "not_ready", message)

    def _told(self, model: RunningModel, now: float) -> ModelState:
        told = model.told(self._cluster.own(), now)
        if self._sleepers is None or not (reason := self._sleepers.reason(model)):
            return told
        return msgspec.structs.replace(told, reason=reason)

    def _sleep_or_wake(self, asked: Ask, now: float) -> list[ModelState]:
        if self._sleepers is None:
            raise ModelRefused(
                403,
                "model_sleep_off",
                "this server was started without --resident and --keep-alive, so its models "
                "neither sleep nor wake",
            )
        self._check_ready()
        model = self._named(asked.about.decode(errors="replace"))
        if asked.what == WAKE_MODEL:
            self._sleepers.wake(model, now)
        elif model.state == Sleep.WAKING:
            message = f"{show(model.name)} is waking; it may be put to sleep when it is awake"
            raise ModelRefused(409, "model_waking", message)
        else:
            self._sleepers.sleep(model, now)
        return [self._told(model, now)]

    def _named(self, name: str) -> RunningModel:
        model = next((one for one in self._models if name in one.names), None)
        if model is None:
            known = ", ".join(show(one.name) for one in self._models)
            raise ModelRefused(
                404, "model_not_found", f"this launcher runs no model {show(name)}; it has: {known}"
            )
        return model

    def _load(self, asked: LoadModel, now: float) -> list[ModelState]:
        running = [one for one in self._models if one.state != FAILED or one.end is not None]
        if len(running) >= MAX_MODELS:
            raise ModelRefused(409, "too_many_models", f"{MAX_MODELS} models run already")
        try:
            folder = find_folder(asked.folder, self._dirs)
        except FolderRefused as refusal:
            message = f"model is {show(asked.folder)}: {refusal}"
            raise ModelRefused(refusal.status, "model_folder_refused", message) from None
        another = AnotherModel(str(folder), asked.name, asked.memory_share)
        try:
            config = self._making.configure(another, [model.config for model in running])
        except (ConfigError, BadModelFolder) as error:
            raise ModelRefused(400, "model_refused", str(error)) from None
        self._check_names(config.model.names(), running)
        model = RunningModel(config, self._making.children(config, self._place), LOADING, now)
        self._place += 1
        again = [one for one in self._models if one not in running and one.name == model.name]
        self._models = [*(one for one in self._models if one not in again), model]
        self.processes.add(model.children)
        self._log.info(f"loading model {model.name} from {folder}")
        return [model.told({}, now)]

    def _check_names(self, names: Sequence[str], running: Sequence[RunningModel]) -> None:
        for name in names:
            if not name or len(name) > MAX_NAME or not name.isprintable():
                raise ModelRefused(
                    400,
                    "bad_name",
                    f"the model's name is {show(name)}; 1 to {MAX_NAME} printable characters are "
                    "allowed, so give another with `name`",
                )
            for model in running:
                if name in model.names:
                    raise ModelRefused(
                        409,
                        "model_exists",
                        f"there is a model {show(name)} already ({model.state}, "
                        f"{model.config.model.model}); give this one another `name`",
                    )
            # Started by hand, or by another launcher.
            everybody = self._cluster.everybody()
            if any(name in (one.identity.model, *one.identity.aliases) for one in everybody):
                raise ModelRefused(
                    409,
                    "model_exists",
                    f"processes of a model {show(name)} are there already, which this launcher "
                    "has not started; give this one another `name`",
                )
            if any(name == adapter.name for one in everybody for adapter in one.capacity.adapters):
                raise ModelRefused(
                    409,
                    "adapter_exists",
                    f"there is an adapter {show(name)}; give this model another `name`",
                )

    def _unload(self, name: str, now: float) -> list[ModelState]:
        model = self._named(name)
        if model.state == FAILED and model.end is None:
            self._models.remove(model)
            return []
        if model.state == FAILED:  # its processes are being killed; then it is forgotten
            model.enter(DRAINING, now)
        if model.state in (LOADING, READY):
            others = [one for one in self._models if one.state == READY and one is not model]
            if not others:
                raise ModelRefused(
                    409,
                    "last_model",
                    f"{show(name)} is the last model; load another one first, or end the server "
                    "(POST /v1/admin/drain)",
                )
            self._log.info(f"unloading model {model.name}")
            model.unload(now, self._drain_s if model.state == READY else 0.0)
            self._withdraw()
        return [model.told(self._cluster.own(), now)]

    # --- what the supervisor says

    def begin(self, now: float | None = None) -> None:
        """The server is ready: from now on models are loaded and unloaded."""
        self._is_ready = True
        if self._spares is not None:
            self._spares.processes = self.processes
        if self._sleepers is not None:
            self._sleepers.processes = self.processes
            self._sleepers.begin(time.monotonic() if now is None else now)

    def close(self) -> None:
        """The server goes down: nothing is loaded any more, and it ends what there is."""
        self._is_closed = True
        if self._spares is not None:
            self._spares.close()
        if self._sleepers is not None:
            self._sleepers.close()

    def ended(self, child: Child, cause: str, *, excused: bool, now: float) -> bool:
        """A process has ended. Returns whether it is not to be started again. ``excused``: it was
        at no fault, since a busy machine kept it from its beats."""
        model = next((one for one in self._models if child in one.children), None)
        if model is None:
            return self._spares is not None and self._spares.ended(child)
        if model.state == LOADING and not excused:
            self._fail(model, cause, now)
        if self._sleepers is not None and self._is_ready:
            return self._sleepers.ended(model, child, cause, excused=excused, now=now)
        return model.end is not None

    def spare_of(self, child: Child) -> Child | None:
        """A process that is prepared to take the place of one that has ended."""
        return None if self._spares is None or self._is_closed else self._spares.take(child)

    def tick(self, now: float) -> None:
        """Go on with what is being loaded and unloaded. Call it a few times a second while the
        server runs, from its being ready on."""
        ending = self._spares is not None and self._spares.ending
        if self._sleepers is not None and not ending:  # else who wakes would miss their memory
            self._sleepers.tick(now)
        for model in list(self._models):
            if model.state == LOADING:
                self._look(model, now)
            open_requests = self._cluster.open_requests(model.name)
            if model.end is not None and model.end.step(now, open_requests):
                self._over(model)
        if self._spares is not None and not self._is_closed:
            self._spares.tick(self._models, self._cluster.own())

    def _look(self, model: RunningModel, now: float) -> None:
        """Whether a model that loads is ready, or takes too long."""
        lacking = model.lacking(self._cluster.own())
        if not lacking:
            self._log.info(f"model {model.name} is ready after {now - model.since:.1f} s")
            model.enter(READY, now)
            self._changed()
        elif now - model.since > self._startup_s:
            self._fail(
                model,
                f"not ready within {self._startup_s:g} s ({', '.join(lacking)}); allow more with "
                "--startup-timeout-s",
                now,
            )

    def _fail(self, model: RunningModel, reason: str, now: float) -> None:
        self._log.error(f"model {model.name} cannot be loaded: {reason}")
        model.fail(reason, now)
        self._withdraw()

    def _over(self, model: RunningModel) -> None:
        """All processes of a model have ended."""
        self.processes.remove(model.children)
        model.children, model.end = [], None
        if model.state == DRAINING:
            self._log.info(f"model {model.name} is unloaded")
            self._models.remove(model)
            self._changed()
        failed = [one for one in self._models if one.state == FAILED and one.end is None]
        for old in failed[:-MAX_FAILED]:
            self._models.remove(old)
        self._withdraw()

    def _withdraw(self) -> None:
        """Tell all which models take no more requests while their processes are still there."""
        self._cluster.unload([one.name for one in self._models if one.end is not None])

    def _changed(self) -> None:
        self._making.changed([one for one in self._models if one.state in (READY, DRAINING)])


def _at_start(configs: Sequence[Config]) -> list[str]:
    """The states of models when a server starts: where only some are awake, the first ones."""
    awake = configs[0].launch.resident or len(configs)
    return [READY if place < awake else Sleep.ASLEEP for place in range(len(configs))]
