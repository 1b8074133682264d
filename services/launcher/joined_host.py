"""``penstock serve --join ADDRESS``: a host that starts its part of another host's server.

It asks the first host which processes it is to start, and with which settings; of its own it has
addresses, secret, devices and, where it lies elsewhere, the model's folder. It keeps its processes
alive as ``serve`` does. With the first host's end it ends; when that is lost, it ends its processes
and waits for it for ``--join-timeout-s``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from penstock.protocol.config import Config, ConfigError, Provenance
from penstock.protocol.config.fields import ModelConfig
from penstock.protocol.config.machine import read_machine
from penstock.protocol.config.resolve import ENVIRONMENT_PREFIX, fields
from penstock.protocol.model_info import BadModelFolder, fingerprint, read_model_info
from penstock.protocol.process import logs
from penstock.protocol.process.participant import Ended
from penstock.protocol.process.plain_structlog import Logger
from penstock.protocol.wire.messages.administration import (
    JOIN_HOST,
    HostOffer,
    HostPart,
    HostProcess,
    Told,
)
from penstock.protocol.wire.messages.membership import Peer, Phase
from penstock.services.launcher.adapter_set import require_none
from penstock.services.launcher.children import rendering
from penstock.services.launcher.cluster_view import HOST, ClusterView
from penstock.services.launcher.environment import child_environment
from penstock.services.launcher.first_host import HOSTS_OWN, devices_here
from penstock.services.launcher.processes import Child
from penstock.services.launcher.serve import supervise
from penstock.services.launcher.supervisor import STARTUP_TIMED_OUT, Supervisor

REFUSED = 5
"""Exit code: the first host has no part for this one."""
ASK_SECONDS = 1.0
GONE_SECONDS = 10.0
"""A first host that a router has not named for so long is gone; a new router hears of its members
one by one."""
SERVICES = ("worker", "scheduler")
"""What the first host may have started here."""


JOINS_WITH = {
    "bind", "advertise", "port_range", "secret", "runtime_dir", "device_index", "model", "join",
    "join_timeout_s", "startup_timeout_s", "drain_timeout_s",
}  # fmt: skip
"""Flags that a joining host takes, with those of the log; all else the first host decides."""


def check_flags(sources: Provenance) -> None:
    """Raises ``ConfigError`` for flags that would have no effect."""
    known = fields()
    refused = [
        known[name].flag
        for name, source in sources.items()
        if source.origin == "flag"
        and name not in JOINS_WITH
        and known[name].group not in ("observability", "test")
    ]
    if refused:
        raise ConfigError(
            f"--join takes no {', '.join(sorted(refused))}: the first host (--nodes) decides that "
            "for all; give it there"
        )


class FirstHostLost(Exception):
    """It may come back."""


class FirstHostEnded(Exception):
    """It has stopped, as asked."""


class JoinFailed(Exception):
    """This host has no part in the server."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def run(config: Config) -> int:
    """Run this host's part until SIGINT or SIGTERM, or the end of the server. Returns the exit
    code. Raises ``AddressError``, ``SecurityError``, and ``BadModelFolder`` where the model's
    folder is missing here or is another one."""
    cluster = msgspec.structs.replace(config.cluster, router=config.launch.join)
    config = msgspec.structs.replace(config, cluster=cluster)
    log = logs.set_up("launcher", config.observability.log_level, config.observability.log_format)
    members = ClusterView(cluster, log)
    try:
        return _JoinedHost(config, members, log).run()
    except (JoinFailed, Ended) as failure:
        logs.flush()
        print(f"penstock: {failure}", file=sys.stderr)
        return failure.code if isinstance(failure, JoinFailed) else REFUSED
    finally:
        members.close(goodbye=True)
        logs.flush()


class _JoinedHost:
    def __init__(self, config: Config, members: ClusterView, log: Logger) -> None:
        self._config, self._members, self._log = config, members, log
        self._limit = config.launch.join_timeout_s
        self._offer = HostOffer(
            HOST, devices_here(config, read_machine(environment=os.environ).gpus)
        )
        self._part: HostPart | None = None
        """What was answered last."""
        self._first = 0
        """The incarnation of the first host's launcher."""
        self._seen_at = time.monotonic()
        self._said = ""
        self._draining = False

    def run(self) -> int:
        self._log.info(f"asks the first host, at {self._config.launch.join}, what to start here")
        while True:
            part = self._wait_for_part()
            children = self._children(part)
            self._log.info(
                f"starts {', '.join(child.label for child in children)} of the server at "
                f"{self._config.launch.join}"
            )
            try:
                return supervise(self._supervisor(children))
            except FirstHostEnded:
                self._log.info("the first host has ended, and so does this one")
                return 0
            except FirstHostLost as loss:
                self._log.warning(f"{loss}; waiting {self._limit:g} s for it (--join-timeout-s)")

    # --- the part

    def _wait_for_part(self) -> HostPart:
        """Ask until there is one. Raises ``JoinFailed``."""
        members = self._members
        members.on_told, members.on_pump = self._told, None
        self._part, asked_at = None, 0.0
        self._seen_at = time.monotonic()
        while True:
            now = time.monotonic()
            members.pump(now)
            part = self._answer()
            if part is not None and part.refused:
                raise JoinFailed(part.refused, REFUSED)
            if part is not None and part.processes:
                return part
            if part is not None and part.waiting != self._said:
                self._said = part.waiting
                self._log.info(f"waiting: {part.waiting}")
            if now - self._seen_at > self._limit:
                raise JoinFailed(
                    f"the first host, whose router is {self._config.launch.join}, has not answered "
                    f"for {self._limit:g} s (--join-timeout-s): is `penstock serve --nodes` "
                    "running there, with the same --secret?",
                    STARTUP_TIMED_OUT,
                )
            if members.joined and now - asked_at >= ASK_SECONDS:
                asked_at = now
                for peer in members.launchers():
                    members.ask(peer.address, JOIN_HOST, msgspec.msgpack.encode(self._offer))
            time.sleep(0.05)

    def _answer(self) -> HostPart | None:
        return self._part

    def _told(self, sender: int, told: Told) -> None:
        """A launcher that is no first host has nothing to say."""
        if told.answer:
            self._first = sender
            self._part = msgspec.msgpack.decode(told.answer, type=HostPart)
            self._seen_at = time.monotonic()

    # --- its processes

    def _children(self, part: HostPart) -> list[Child]:
        folder = self._folder(part)
        own = msgspec.structs.replace(
            Config(),
            cluster=msgspec.structs.replace(
                Config().cluster,
                **{
                    name: getattr(self._config.cluster, name)
                    for name in ("router", "bind", "advertise", "port_range", "secret")
                },
            ),
            model=ModelConfig(model=str(folder)),
            observability=self._config.observability,
            test=self._config.test,
        )
        here = {**child_environment(own, os.environ), "PENSTOCK_LOG_FORMAT": "json"}
        device, kind = self._config.device.device_index, fields()["device"].variable
        children = []
        for process in part.processes:
            if process.service not in SERVICES:
                raise JoinFailed(f"the first host asks for a {process.service}", REFUSED)
            environment = {**_settings(process), **here}
            if process.service == "worker" and environment.get(kind) == "cuda":
                environment[fields()["device_index"].variable] = str(device)
                device += 1
            children.append(
                Child(process.service, process.number, environment, render=rendering(self._config))
            )
        return children

    def _folder(self, part: HostPart) -> Path:
        """The model's folder on this host. Raises ``BadModelFolder``."""
        folder = Path(self._config.model.model or part.folder).absolute()
        where = (
            f"the first host serves the model in {part.folder}; it must be on this host as well, "
            "with the same files: copy it there, or name another folder as in `penstock serve "
            "--join ADDRESS FOLDER`"
        )
        try:
            read_model_info(folder)
        except BadModelFolder as error:
            raise BadModelFolder(f"{error}\n{where}") from None
        if (found := fingerprint(folder)) != part.fingerprint:
            raise BadModelFolder(
                f"{folder} has other files (fingerprint {found}) than the first host's folder "
                f"(fingerprint {part.fingerprint})\n{where}"
            )
        return folder

    def _supervisor(self, children: Sequence[Child]) -> Supervisor:
        launch = self._config.launch
        self._seen_at, self._draining = time.monotonic(), False
        self._members.on_told, self._members.on_pump = None, self._look
        return Supervisor(
            children,
            self._members,
            self._log,
            drain_timeout_s=launch.drain_timeout_s,
            startup_timeout_s=launch.startup_timeout_s,
            on_phase=lambda label, phase, note: None,
            is_ready=lambda: True,
            on_ready=lambda: self._ready(children),
            on_stop=lambda: None,
        )

    def _ready(self, children: Sequence[Child]) -> None:
        require_none(children)
        self._log.info("all processes of this host are ready")

    def _look(self, now: float) -> None:
        """What has become of the first host. Raises ``FirstHostLost`` and ``FirstHostEnded``."""
        members = self._members
        launchers = {peer.incarnation: peer for peer in members.launchers()}
        if members.joined and (first := launchers.get(self._first)) is not None:
            self._seen_at, self._draining = now, first.phase == Phase.DRAINING
            if self._draining and not self._serves(first):
                raise FirstHostEnded
            return
        silent = now - self._seen_at
        if self._draining and silent > 1.0:
            raise FirstHostEnded
        if silent > (GONE_SECONDS if members.joined else self._limit):
            raise FirstHostLost("the first host is gone")

    def _serves(self, first: Peer) -> bool:
        return any(
            peer.service == "frontend" and peer.identity.host == first.identity.host
            for peer in self._members.everybody()
        )


def _settings(process: HostProcess) -> Mapping[str, str]:
    """Those that the first host decides."""
    own = {fields()[name].variable for name in HOSTS_OWN}
    return {
        name: value
        for name, value in process.environment.items()
        if name.startswith(ENVIRONMENT_PREFIX) and name not in own
    }
