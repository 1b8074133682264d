"""``penstock serve MODEL …``: every process of a server, from nothing to the printed URL."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

import penstock
from penstock.protocol.config import ClusterConfig, Config
from penstock.protocol.config.machine import read_machine
from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.config.terminal import is_terminal, style_of
from penstock.protocol.model_info import read_model_info
from penstock.protocol.process import logs
from penstock.protocol.process.plain_structlog import Logger
from penstock.protocol.process.running_servers import Registration
from penstock.protocol.wire.messages.administration import JOIN_HOST, Ask, Told
from penstock.services.launcher.adapter_set import AdapterSet, require_none
from penstock.services.launcher.announcement import announcement
from penstock.services.launcher.children import ServerChildren, make_children
from penstock.services.launcher.cluster_view import ClusterView
from penstock.services.launcher.first_host import FirstHost, devices_here
from penstock.services.launcher.later_models import Configure, LaterModels
from penstock.services.launcher.listening import (
    answers_ready,
    check_router_is_free,
    listen_for,
    reserve,
    url,
)
from penstock.services.launcher.model_set import ModelSet
from penstock.services.launcher.processes import Child
from penstock.services.launcher.progress import (
    Announcement,
    StartupLines,
    announce,
)
from penstock.services.launcher.ray_hosts import RayHosts, connect, on_ray
from penstock.services.launcher.runtime_folder import RESPONSES, listed_folder, server_folder
from penstock.services.launcher.supervisor import StartFailed, Supervisor


def run(
    configs: Sequence[Config],
    *,
    builtin: bool = False,
    began: float | None = None,
    configure: Configure | None = None,
    layout: str = "",
) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit code.

    One of ``configs`` for each model, which names its folder; they differ in nothing that concerns
    the whole server. ``builtin``: the model is the built-in one. ``began`` is the monotonic time at
    which the command was started. ``configure`` makes the configuration of a model that is loaded
    later; without it none can be. ``layout`` is said at the start. Raises ``BadModelFolder``,
    ``AddressError``, ``SecurityError`` and ``ConfigError`` before any process is started.
    """
    began = time.monotonic() if began is None else began
    configs = _placed(configs)
    config = configs[0]
    with contextlib.ExitStack() as stack:
        configs, listener, leave, grpc, members, log, registration = _taken(configs, stack)
        children = make_children(configs, listener, os.environ)
        first = _first_host(configs[0], children, members, log, stack)
        models = None
        if configure is not None:
            making = LaterModels(configs, children, configure, registration)
            models = _model_set(configs, children, making, members, log, first)
        lines, tls = _startup_lines(config, log), bool(config.server.tls_cert)
        started = _started(children, models, first)
        _say_start(lines, len(started), configs, first is not None, builtin, layout)
        supervisor = Supervisor(
            started,
            members,
            log,
            drain_timeout_s=config.launch.drain_timeout_s,
            startup_timeout_s=config.launch.startup_timeout_s,
            on_phase=lines.phase,
            is_ready=lambda: (first is None or first.placed) and answers_ready(listener, tls=tls),
            on_ready=lambda: _ready(
                registration,
                models,
                children,
                announcement(configs, url(listener, tls=tls), grpc, members.everybody(), began),
                _for_people(config),
            ),
            on_stop=lambda: _close(listener, leave, models, members),
            models=models,
        )
        return _supervise(supervisor, models, first, lines)


def _supervise(
    supervisor: Supervisor, models: ModelSet | None, first: FirstHost | None, lines: StartupLines
) -> int:
    """Watch all processes until the end, also those that models and hosts bring later."""
    if models is not None:
        models.processes = supervisor
    if first is None:
        return supervise(supervisor, before_error=lines.clear)
    first.add = supervisor.add
    return supervise(supervisor, before_error=lines.clear, missing=first.missing)


class _Taken(NamedTuple):
    """What a server holds before a process of it starts, until its end."""

    configs: Sequence[Config]
    """With the addresses that were taken."""
    listener: socket.socket
    leave: Callable[[], None]
    """Takes the socket's name away from those who look for it."""
    grpc: socket.socket | None
    members: ClusterView
    log: Logger
    registration: Registration


def _taken(configs: Sequence[Config], stack: contextlib.ExitStack) -> _Taken:
    """The ports, a folder for the sockets, a seat among the members, an entry among the running
    servers; ``stack`` gives them back. Raises ``AddressError``, ``SecurityError``."""
    config = configs[0]
    listener, leave = listen_for(config.server)
    stack.enter_context(listener)
    if config.server.uds:
        stack.callback(leave)
    grpc = _reserved(config.server, stack)
    cluster, log, members, folder = stack.enter_context(_cluster(config))
    server = config.server if config.cluster.router else sharing_responses(config, cluster)
    if config.server.has_grpc:
        server = _with_grpc(server, grpc, configs)
    configs = [msgspec.structs.replace(one, cluster=cluster, server=server) for one in configs]
    served = [(one.model.names()[0], one.model.model) for one in configs]
    drain = config.launch.drain_timeout_s
    listed = stack.enter_context(listed_folder(os.environ, folder))
    registration = Registration(folder, cluster.router, drain, served, listed)
    stack.callback(registration.remove)
    return _Taken(configs, listener, leave, grpc, members, log, registration)


def _started(
    children: ServerChildren, models: ModelSet | None, first: FirstHost | None
) -> list[Child]:
    """The processes that start now: not those of models that sleep, nor engines of several hosts
    while these are not there."""
    asleep = [] if models is None else models.asleep
    awake = children.all if first is None else children.without_engines
    return [child for child in awake if child not in asleep]


def _placed(configs: Sequence[Config]) -> list[Config]:
    """With what the folders and the hosts of Ray say."""
    found = [_of_folder(one) for one in configs]
    if found[0].launch.executor != "ray":
        return found
    connect(found[0])
    return [on_ray(found[0])]


def _startup_lines(config: Config, log: Logger) -> StartupLines:
    style = style_of(2)
    return StartupLines(log, style if style.cursor and logs.for_people(_form(config)) else None)


def _say_start(
    lines: StartupLines,
    processes: int,
    configs: Sequence[Config],
    waits: bool,
    builtin: bool,
    layout: str,
) -> None:
    """waits: the workers do, for other hosts. layout: which one was chosen and why."""
    lines.say(
        f"penstock {penstock.__version__} starts {processes} processes for "
        f"{' and '.join(one.model.model for one in configs)}"
        + ("; workers start when all hosts are there" if waits else "")
    )
    if builtin:
        lines.say("this built-in model is small: `penstock eval` says what it can do")
    if layout:
        lines.say(layout)


def _model_set(
    configs: Sequence[Config],
    children: ServerChildren,
    making: LaterModels,
    members: ClusterView,
    log: Logger,
    first: FirstHost | None,
) -> ModelSet:
    """The server's models, which answers what frontends ask about them; hosts ask ``first``."""
    models = ModelSet(configs, children, making, members, log, time.monotonic())
    engines = children.models[0].engines
    adapters = AdapterSet(configs, [one for one in engines if one.service == "worker"])

    def answer(asked: Ask) -> Told:
        if first is not None and asked.what == JOIN_HOST:
            return first.answer(asked)
        return adapters.answer(asked) or models.answer(asked, time.monotonic())

    members.on_ask = answer
    return models


def _first_host(
    config: Config,
    children: ServerChildren,
    members: ClusterView,
    log: Logger,
    stack: contextlib.ExitStack,
) -> FirstHost | None:
    """What tells the other hosts of a server on several what to start."""
    if config.launch.nodes == 1:
        return None
    by_ray = config.launch.executor == "ray"
    first = FirstHost(
        config,
        children.models[0].engines,
        None if by_ray else devices_here(config, read_machine(environment=os.environ).gpus),
        lambda: {peer.address for peer in members.everybody()},
        log,
    )
    members.on_pump = first.remind
    if by_ray:
        hosts = RayHosts(config, log)
        stack.callback(hosts.close)

        def look(now: float) -> None:
            hosts.look(now)
            first.remind(now)

        members.on_pump = look
    return first


def _ready(
    registration: Registration,
    models: ModelSet | None,
    children: ServerChildren,
    server: Announcement,
    people: bool,
) -> None:
    require_none(children.all)
    if models is not None:
        models.begin()
    registration.ready(server.url)
    announce(server, people=people, style=style_of(1))


def _with_grpc(
    server: ServerConfig, grpc: socket.socket | None, configs: Sequence[Config]
) -> ServerConfig:
    """What frontends are told of gRPC: a port, and whose tokenizer gateways may fetch."""
    port = server.grpc_port if grpc is None else grpc.getsockname()[1]
    folder = server.grpc_tokenizer or (configs[0].model.model if len(configs) == 1 else "")
    return msgspec.structs.replace(server, grpc_port=port, grpc_tokenizer=folder)


def _reserved(server: ServerConfig, stack: contextlib.ExitStack) -> socket.socket | None:
    """The port of gRPC, if there is to be one, held until the end."""
    if server.grpc_port is None:
        return None
    host = server.grpc_host or server.host
    return stack.enter_context(reserve(host, server.grpc_port, "--grpc-port"))


def _close(
    listener: socket.socket,
    leave: Callable[[], None],
    models: ModelSet | None,
    members: ClusterView,
) -> None:
    """Leave the port to the frontends, which drain: they serve who is connected by now."""
    members.drain()
    if models is not None:
        models.close()
        if models.may_sleep:  # what waits for one that sleeps is finished as well
            members.on_pump = models.tick
    leave()
    listener.close()


def _form(config: Config) -> str:
    return config.observability.log_format


def _for_people(config: Config) -> bool:
    """Whether the announcement is for people: unless JSON was asked for, or nobody watches."""
    auto = _form(config) == "auto" and is_terminal(1)
    return auto or logs.for_people(_form(config))


def run_headless(config: Config) -> int:
    """Serve the library: no frontends, the router's address and the model's folder on standard
    output once everything is ready, and the end when standard input closes. The router is always
    one of its own. Returns the exit code; raises as ``run`` does.
    """
    config = _of_folder(config)
    alone = msgspec.structs.replace(config.cluster, router="")
    with _cluster(msgspec.structs.replace(config, cluster=alone)) as (cluster, log, members, _):
        ready = f"penstock-ready {cluster.router}\t{config.model.model}"
        supervisor = Supervisor(
            make_children([msgspec.structs.replace(config, cluster=cluster)], None, os.environ).all,
            members,
            log,
            drain_timeout_s=0.0,
            startup_timeout_s=config.launch.startup_timeout_s,
            on_phase=lambda label, phase, note: None,
            is_ready=lambda: True,
            on_ready=lambda: print(ready, flush=True),
            on_stop=lambda: None,
            lifeline=sys.stdin.fileno(),
        )
        return supervise(supervisor)


def _of_folder(config: Config) -> Config:
    """The same with the model's folder as an absolute path. Raises ``BadModelFolder``."""
    folder = Path(config.model.model).absolute()
    read_model_info(folder)
    model = msgspec.structs.replace(config.model, model=str(folder))
    return msgspec.structs.replace(config, model=model)


@contextlib.contextmanager
def _cluster(
    config: Config,
) -> Iterator[tuple[ClusterConfig, Logger, ClusterView, Path]]:
    """A place for the sockets, the log, and a seat among the members, until the end.

    Yields the settings of the cluster with the router's address, and the folder last. Raises
    ``AddressError``, ``SecurityError``.
    """
    with contextlib.ExitStack() as stack:
        cluster = config.cluster
        # One that is named belongs to the server whose router is in it.
        named = "" if cluster.router else cluster.runtime_dir
        place = stack.enter_context(server_folder(os.environ, named))
        if not cluster.router:
            cluster = msgspec.structs.replace(cluster, router=f"ipc://{place}/router.sock")
        check_router_is_free(cluster.router)
        level, form = config.observability.log_level, config.observability.log_format
        log = logs.set_up("launcher", level, form)
        stack.callback(logs.flush)
        members = ClusterView(cluster, log)
        stack.callback(members.close)
        yield cluster, log, members, place


def supervise(
    supervisor: Supervisor,
    before_error: Callable[[], None] = lambda: None,
    missing: Callable[[], str] = str,
) -> int:
    """Run to the end. Returns the exit code; says why a start failed, and what was missing
    beside."""
    try:
        return supervisor.run()
    except StartFailed as failure:
        before_error()
        logs.flush()
        words = [str(failure), missing()]
        print(f"penstock: {'; '.join(filter(None, words))}", file=sys.stderr)
        return failure.code


def sharing_responses(config: Config, cluster: ClusterConfig) -> ServerConfig:
    """Several frontends that are to keep responses in memory share a folder beside their sockets:
    the next request of a client may come to any of them. It ends with the server, too."""
    if config.launch.frontends == 1 or config.server.response_store != "memory":
        return config.server
    place = Path(cluster.router.removeprefix("ipc://")).parent / RESPONSES
    return msgspec.structs.replace(config.server, response_store=str(place))
