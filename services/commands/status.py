"""``penstock status``: the processes, queues and rates of a running server."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.protocol.config.terminal import style_of
from penstock.services.commands.failure import UNREACHABLE, CommandError
from penstock.services.commands.parser import CommandParser, add_key_flag, client
from penstock.services.commands.printable import only_colours
from penstock.services.commands.server_state import understood
from penstock.services.commands.servers_here import server_here
from penstock.services.commands.status_text import rates, status_text

if TYPE_CHECKING:
    from penstock.protocol.process.running_servers import RunningServer
    from penstock.services.commands.api_client import ApiClient

INTERVAL_S = 1.0
METRICS_S = 3.0
Read = Callable[[], dict[str, Any]]


def parser() -> CommandParser:
    parser = CommandParser(
        "status",
        "[URL | FOLDER] [flags]",
        "Show the processes, queues and rates of a running server. One of this user on this host "
        "is asked itself, also while it starts and without a key; any other over HTTP.",
    )
    parser.add_argument(
        "SERVER", nargs="?", metavar="URL | FOLDER",
        help="the server, or its runtime folder; may be left out where this user has only one",
    )  # fmt: skip
    add_key_flag(parser)
    parser.add_argument("--watch", action="store_true", help="show it again and again")
    parser.add_argument(
        "--interval", type=_seconds, default=INTERVAL_S, metavar="S",
        help="seconds that rates are measured over, and between two looks (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help="one JSON object, with --watch one a line"
    )
    return parser


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"expected seconds from 0.1 to 3600, got {text!r}")
    return value


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Returns the exit code. Raises ``CommandError``."""
    parsed = parser().parse_args(arguments)
    with _source(parsed, environment) as read:
        try:
            return _show(read, parsed)
        except KeyboardInterrupt:
            if not parsed.watch:
                raise
            return 0


@contextlib.contextmanager
def _source(parsed: Any, environment: Mapping[str, str]) -> Iterator[Read]:
    """What gives the state of the server that is meant."""
    here = server_here(parsed.SERVER, environment)
    if here is not None:
        from penstock.services.commands.router_connection import joined

        with joined(here.record.router) as members:
            if members is not None:
                yield lambda: _from_members(members, here)
                return
    if parsed.SERVER and os.path.isdir(parsed.SERVER):
        raise CommandError(f"no server of yours runs in {parsed.SERVER}", UNREACHABLE)
    server = client(
        parsed.SERVER or (here.record.url if here else None), parsed.api_key, environment
    )
    yield lambda: _from_frontend(server)


def _from_frontend(server: ApiClient) -> dict[str, Any]:
    from penstock.protocol.process.pipeline_status import PIPELINE

    state = understood(server.get("/playground/status"))
    processes = [one for one in state["processes"] if one["service"] in PIPELINE]
    return {**state, "url": server.endpoint.url, "processes": processes}


def _from_members(members: Any, here: RunningServer) -> dict[str, Any]:
    """The same as a frontend tells, from the router. Raises ``CommandError``."""
    from penstock import __version__
    from penstock.protocol.process.participant import Ended
    from penstock.protocol.process.pipeline_status import pipeline_status

    try:
        answer = members.metrics(METRICS_S)
    except Ended as error:
        raise CommandError(str(error), UNREACHABLE) from None
    if answer is None:
        raise CommandError("the router does not answer", UNREACHABLE)
    phases = {peer.phase for peer in members.peers}
    record = here.record
    return {
        "version": __version__,
        "url": record.url,
        "folder": here.folder,
        "pid": record.pid,
        "uptime_s": round(here.uptime_s(), 1),
        "ready": bool(record.url) and phases == {"ready"},
        "draining": "draining" in phases,
        "models": [{"name": name} for name in record.models],
        **pipeline_status(answer, members.peers),
    }


def _show(read: Read, parsed: Any) -> int:
    """Once, or until Ctrl-C."""
    style = style_of(1)
    screen = _Screen() if parsed.watch and style.cursor and not parsed.json else None
    before, before_at = read(), time.monotonic()
    with screen or contextlib.nullcontext():
        while True:
            time.sleep(parsed.interval)
            now, at = read(), time.monotonic()
            found = {**now, "rates": rates(before, now, at - before_at)}
            before, before_at = now, at
            if parsed.json:
                data = msgspec.json.encode(found)
                print((data if parsed.watch else msgspec.json.format(data)).decode(), flush=True)
            elif screen:
                screen.draw(only_colours(status_text(found, style)))
            else:
                print(only_colours(status_text(found, style)) + "\n" * parsed.watch, flush=True)
            if not parsed.watch:
                return 0


class _Screen:
    """Draws a text over the one that it drew before. Lines are cut at the terminal's edge."""

    def __init__(self) -> None:
        self._drawn = 0

    def __enter__(self) -> None:
        sys.stdout.write("\x1b[?7l")  # no line goes on in a second row

    def __exit__(self, *_: object) -> None:
        sys.stdout.write("\x1b[?7h")
        sys.stdout.flush()

    def draw(self, text: str) -> None:
        lines = text.split("\n")[: shutil.get_terminal_size().lines - 1]
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        body = "".join(f"{line}\x1b[K\n" for line in lines)
        sys.stdout.write(f"{up}\r{body}\x1b[J")
        sys.stdout.flush()
        self._drawn = len(lines)
