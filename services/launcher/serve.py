"""``penstock serve MODEL``: every process of a server, from nothing to the printed URL."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

import penstock
from penstock.protocol.config import Config
from penstock.protocol.config.terminal import is_terminal, style_of
from penstock.protocol.model_info import read_model_info
from penstock.protocol.process import logs
from penstock.protocol.process.console import rendered
from penstock.protocol.process.plain_structlog import Logger
from penstock.protocol.wire.messages.membership import Peer
from penstock.protocol.wire.syn_filter import take_no_more_connections
from penstock.services.launcher.cluster_view import ClusterView
from penstock.services.launcher.environment import child_environment
from penstock.services.launcher.listening import answers_ready, check_router_is_free, listen, url
from penstock.services.launcher.processes import Child
from penstock.services.launcher.progress import (
    Announcement,
    StartupLines,
    announce,
    has_chat_template,
)
from penstock.services.launcher.runtime_folder import server_folder
from penstock.services.launcher.supervisor import StartFailed, Supervisor


def run(config: Config, *, builtin: bool = False, began: float | None = None) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit code.

    ``config.model`` names the model's folder; ``builtin``: it is the built-in one. ``began`` is
    the monotonic time at which the command was started. Raises ``BadModelFolder``,
    ``AddressError``, ``SecurityError`` and ``ConfigError`` before any process is started.
    """
    began = time.monotonic() if began is None else began
    config = _of_folder(config)
    people = _for_people(config)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen(config.server.host, config.server.port))
        config, log, members = stack.enter_context(_cluster(config))
        children = make_children(config, listener, os.environ)
        style = style_of(2)
        lines = StartupLines(
            log, style if style.cursor and logs.for_people(_form(config)) else None
        )
        lines.say(
            f"penstock {penstock.__version__} starts {len(children)} processes for "
            f"{config.model.model}"
        )
        if builtin:
            lines.say("this built-in model is small: `penstock eval` says what it can do")
        supervisor = Supervisor(
            children,
            members,
            log,
            drain_timeout_s=config.launch.drain_timeout_s,
            startup_timeout_s=config.launch.startup_timeout_s,
            on_phase=lines.phase,
            is_ready=lambda: answers_ready(listener),
            on_ready=lambda: announce(
                _announcement(config, url(listener), members.own().values(), began),
                people=people,
                style=style_of(1),
            ),
            on_stop=lambda: _close(listener),
        )
        return _supervise(supervisor, before_error=lines.clear)


def _close(listener: socket.socket) -> None:
    """Leave the port to the frontends, which drain: they serve who is connected by now."""
    take_no_more_connections(listener)
    listener.close()


def _form(config: Config) -> str:
    return config.observability.log_format


def _for_people(config: Config) -> bool:
    """Whether the announcement is for people: unless JSON was asked for, or nobody watches."""
    auto = _form(config) == "auto" and is_terminal(1)
    return auto or logs.for_people(_form(config))


def _announcement(
    config: Config, address: str, peers: Iterable[Peer], began: float
) -> Announcement:
    """``peers``: this server's processes, whose engines know what they hold."""
    engines = [peer for peer in peers if peer.service == "scheduler"]
    folder = Path(config.model.model)
    return Announcement(
        url=address,
        model=(config.model.served_model_name or [folder.resolve().name])[0],
        folder=str(folder),
        device=config.device.device,
        dtype=config.model.dtype,
        max_model_len=min((peer.capacity.max_model_len for peer in engines), default=0),
        kv_tokens=sum(peer.capacity.num_blocks * peer.capacity.block_size for peer in engines),
        router=config.cluster.router,
        seconds=round(time.monotonic() - began, 2),
        drain_timeout_s=config.launch.drain_timeout_s,
        chat=has_chat_template(folder),
        keys=bool(config.server.api_key),
    )


def run_headless(config: Config) -> int:
    """Serve the library: no frontends, the router's address on standard output once everything is
    ready, and the end when standard input closes. The router is always one of its own. Returns the
    exit code; raises as ``run`` does.
    """
    config = _of_folder(config)
    alone = msgspec.structs.replace(config.cluster, router="")
    with _cluster(msgspec.structs.replace(config, cluster=alone)) as (config, log, members):
        router = config.cluster.router
        supervisor = Supervisor(
            make_children(config, None, os.environ),
            members,
            log,
            drain_timeout_s=0.0,
            startup_timeout_s=config.launch.startup_timeout_s,
            on_phase=lambda label, phase, note: None,
            is_ready=lambda: True,
            on_ready=lambda: print(f"penstock-ready {router}", flush=True),
            on_stop=lambda: None,
            lifeline=sys.stdin.fileno(),
        )
        return _supervise(supervisor)


def _of_folder(config: Config) -> Config:
    """The same with the model's folder as an absolute path. Raises ``BadModelFolder``."""
    folder = Path(config.model.model).absolute()
    read_model_info(folder)
    model = msgspec.structs.replace(config.model, model=str(folder))
    return msgspec.structs.replace(config, model=model)


@contextlib.contextmanager
def _cluster(
    config: Config,
) -> Iterator[tuple[Config, Logger, ClusterView]]:
    """A place for the sockets, the log, and a seat among the members, until the end.

    Yields the configuration with the router's address. Raises ``AddressError``, ``SecurityError``.
    """
    with contextlib.ExitStack() as stack:
        cluster = config.cluster
        if not cluster.router:
            place = stack.enter_context(server_folder(os.environ, cluster.runtime_dir))
            cluster = msgspec.structs.replace(cluster, router=f"ipc://{place}/router.sock")
        check_router_is_free(cluster.router)
        level, form = config.observability.log_level, config.observability.log_format
        log = logs.set_up("launcher", level, form)
        stack.callback(logs.flush)
        members = ClusterView(cluster, log)
        stack.callback(members.close)
        yield msgspec.structs.replace(config, cluster=cluster), log, members


def _supervise(supervisor: Supervisor, before_error: Callable[[], None] = lambda: None) -> int:
    """Run to the end. Returns the exit code; says why a start failed."""
    try:
        return supervisor.run()
    except StartFailed as failure:
        before_error()
        logs.flush()
        print(f"penstock: {failure}", file=sys.stderr)
        return failure.code


def make_children(
    config: Config, listener: socket.socket | None, inherited: Mapping[str, str]
) -> list[Child]:
    """One child for each process of the server, none started yet, in the order to start them:
    behind the router each engine's worker, which takes longest.

    Without a ``listener`` there are no frontends.
    """
    shared = child_environment(config, inherited)
    shared["PENSTOCK_LOG_FORMAT"] = "json"  # for people the launcher renders all lines alike
    people = logs.for_people(_form(config))
    render = functools.partial(rendered, style=style_of(2)) if people else None
    launch = config.launch
    children = [
        Child("router", 0, _router_environment(shared, config), only_one=True, render=render)
    ]
    for number in range(launch.data_parallel_size):
        engine = {**shared, "PENSTOCK_ENGINE": str(number)}
        worker = engine
        if config.device.device == "cuda":
            device = config.device.device_index + number
            worker = {**engine, "PENSTOCK_DEVICE_INDEX": str(device)}
        world = config.cluster.world_size
        for rank in range(world):
            ranked = worker if world == 1 else {**worker, "PENSTOCK_RANK": str(rank)}
            children.append(Child("worker", number * world + rank, ranked, render=render))
        children.append(Child("scheduler", number, engine, render=render))
    for number in range(launch.tokenizers):
        children.append(Child("tokenizer", number, shared, render=render))
    if listener is not None:
        for number in range(launch.frontends):
            children.append(Child("frontend", number, shared, listener.fileno(), render=render))
    return children


def _router_environment(shared: Mapping[str, str], config: Config) -> dict[str, str]:
    """``--bind`` is where every process listens; the router does so at its known port."""
    environment = dict(shared)
    bind, router = config.cluster.bind, config.cluster.router
    if bind and router.startswith("tcp://"):
        host, port = bind.removeprefix("tcp://").partition(":")[0], router.rpartition(":")[2]
        environment["PENSTOCK_BIND"] = f"tcp://{host}:{port}"
    else:
        environment.pop("PENSTOCK_BIND", None)
    return environment
