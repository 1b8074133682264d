"""``penstock stop``: end a server of this user on this host, once its requests are done."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.protocol.process.running_servers import RunningServer
from penstock.services.commands.failure import FAILED, UNREACHABLE, CommandError
from penstock.services.commands.parser import CommandParser
from penstock.services.commands.servers_here import server_here

TELL_S = 5.0
LOOK_S = 0.2
GRACE_S = 30.0
"""Beyond the drain: its processes end one kind after the other, 5 s each at most."""

if TYPE_CHECKING:
    from penstock.protocol.process.onlooker import Onlooker


def parser() -> CommandParser:
    parser = CommandParser(
        "stop",
        "[URL | FOLDER] [flags]",
        "Stop a server that `penstock serve` runs on this host for the same user: it takes no new "
        "requests, and ends when those that run are done or --drain-timeout-s has passed.",
    )
    parser.add_argument(
        "SERVER", nargs="?", metavar="URL | FOLDER",
        help="where it listens, or its runtime folder; may be left out where there is only one",
    )  # fmt: skip
    parser.add_argument("--now", action="store_true", help="do not wait for running requests")
    return parser


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Returns once the server has ended. Raises ``CommandError``."""
    parsed = parser().parse_args(arguments)
    server = server_here(parsed.SERVER, environment)
    process = server.open_process() if server else None
    if server is None or process is None:
        where = f" at {parsed.SERVER}" if parsed.SERVER else ""
        raise CommandError(
            f"no server of yours runs on this host{where}; one in a container, on another host or "
            "of another user is stopped there",
            UNREACHABLE,
        )
    try:
        return _stop(server, process, now=parsed.now)
    finally:
        os.close(process)


def _stop(server: RunningServer, process: int, *, now: bool) -> int:
    record, began = server.record, time.monotonic()
    name = f"{record.url or server.folder} (process {record.pid})"
    with _requests(record.router) as running:
        # A second SIGTERM would be lost on a launcher that has not taken the first one yet.
        _signal(process, name, signal.SIGQUIT if now else signal.SIGTERM)
        if now:
            print(f"{name} ends at once", flush=True)
        else:
            print(
                f"{name}: running requests have {record.drain_timeout_s:g} s to finish", flush=True
            )
        deadline = began + record.drain_timeout_s + GRACE_S
        told_at = 0.0
        while not _ended(process, LOOK_S):
            at = time.monotonic()
            if at > deadline:
                raise CommandError(f"{name} has not ended after {at - began:.0f} s; --now ends it")
            if at - told_at >= TELL_S and (count := running()):
                told_at = at
                left = max(0.0, record.drain_timeout_s - (at - began))
                noun = "request runs" if count == 1 else "requests run"
                print(f"{count} {noun}; {left:.0f} s left", flush=True)
    print(f"stopped after {time.monotonic() - began:.1f} s")
    return 0


def _signal(process: int, name: str, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        try:
            signal.pidfd_send_signal(process, number)
        except PermissionError:
            raise CommandError(f"{name} is not yours", FAILED) from None


def _ended(process: int, seconds: float) -> bool:
    """Whether the process ends within so many seconds."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


@contextlib.contextmanager
def _requests(router: str) -> Iterator[Callable[[], int]]:
    """Gives a function that says how many requests run, as far as the frontends tell."""
    from penstock.services.commands.router_connection import joined

    with joined(router) as members:
        yield lambda: _open_requests(members)


def _open_requests(members: Onlooker | None) -> int:
    if members is None:
        return 0
    try:
        members.pump(0.0)
    except Exception:  # it was refused or fenced, as befits a server that ends
        return 0
    frontends = [peer for peer in members.peers if peer.service == "frontend"]
    return sum(peer.load for peer in frontends if peer.phase == "draining")
