"""A server whose model is divided among some cards: its ranks, and what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from penstock.loadtest.own_server import own_server
from penstock.loadtest.studies.divided_layout import Cards, Layout
from penstock.protocol.config.machine import VISIBLE_DEVICES, visible_devices

MODEL = "kept"
"""Its name in requests (``kept_sessions.stream``)."""
_ANSWER_S = 5.0
_LOOK_S = 0.05
_END_S = 5.0
"""For processes that are told to end with their parent."""


class DividedServer:
    """Of one layout. Processes are known by their process ids, ranks by the number of the worker:
    those of the first engine come first."""

    def __init__(self, url: str, layout: Layout, cards: Sequence[int]) -> None:
        self.url, self.layout, self.cards = url, layout, cards
        self._seen: set[int] = set()
        self.left: list[str] = []
        """Once it has ended: processes that still run and files that it did not take away."""

    def engine_of(self, worker: int) -> range:
        """The workers of that one's engine."""
        first = worker - worker % self.layout.ranks
        return range(first, first + self.layout.ranks)

    def workers(self) -> dict[int, int]:
        """The process of each rank that is ready."""
        found = {}
        for one in self._members():
            self._seen.add(one["pid"])
            if one["service"] == "worker" and one["phase"] == "ready":
                number = re.search(r"worker.*? (\d+)", _command(one["pid"]))
                if number:
                    found[int(number[1])] = one["pid"]
        return found

    def await_workers(self, gone: set[int], within_s: float) -> None:
        """Until all ranks are ready and none is a process of ``gone``. Raises ``TimeoutError``."""
        deadline = time.monotonic() + within_s
        while len(found := self.workers()) < self.layout.cards or gone & set(found.values()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all ranks were back within {within_s:g} s: {found}")
            time.sleep(_LOOK_S)

    def _members(self) -> list[dict[str, Any]]:
        """Empty while nobody answers."""
        try:
            url = self.url + "/playground/status"
            with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:
                found: list[dict[str, Any]] = json.load(answer)["processes"]
        except OSError:
            return []
        return found

    def look_for_remains(self, place: Path) -> None:
        deadline = time.monotonic() + _END_S
        while any(map(_command, self._seen)) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        self.left = [command for pid in self._seen if (command := _command(pid))]
        self.left += [str(path) for path in place.rglob("*")]


def _command(pid: object) -> str:
    """What a process is called; empty when it has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return words.replace(b"\0", b" ").decode(errors="replace").strip()


@contextmanager
def divided_server(
    model: str, layout: Layout, cards: Sequence[int], flags: Sequence[str]
) -> Iterator[DividedServer]:
    """Runs on these cards alone, until the block ends, and must not be ended from another thread.
    Raises ``ServerFailed``."""
    shown = visible_devices(os.environ.get(VISIBLE_DEVICES))
    names = [str(card) if shown is None else shown[card] for card in cards]
    with tempfile.TemporaryDirectory(prefix="divided") as place:
        given = {VISIBLE_DEVICES: ",".join(names), "XDG_RUNTIME_DIR": place}
        arguments = [model, "--served-model-name", MODEL, *layout.flags, *flags]
        with own_server(arguments, {**os.environ, **given}) as url:
            server = DividedServer(url, layout, cards)
            server.await_workers(set(), 60.0)
            yield server
        server.look_for_remains(Path(place))


@contextmanager
def server_in_turn(
    model: str,
    layout: Layout,
    cards: Cards,
    taken: Sequence[int],
    flags: Sequence[str],
    started: threading.Barrier,
) -> Iterator[DividedServer]:
    """One of several that start at the same time: the block begins when all have started, or have
    failed, and no other one of these cards is in its block, nor has yet to end behind it.
    Raises ``ServerFailed``."""
    with ExitStack() as turn, ExitStack() as running:
        try:
            server = running.enter_context(divided_server(model, layout, taken, flags))
        finally:
            started.wait()
        turn.enter_context(cards.alone(taken))
        yield server
