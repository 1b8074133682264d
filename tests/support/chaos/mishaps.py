"""What may happen to a server: kills, stops, pauses, processes that come, go, and come back late.

The launcher's own processes are replaced by it. Those that are added by hand are nobody's but the
test's: only they can be stopped, replaced, and go on afterwards.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter, defaultdict
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from support.chaos.by_hand import FENCED, PATIENCE, OneProcess
from support.chaos.victims import children, find, members, whole_again
from support.pipeline.served import Served
from support.polling import until

ROLES = ("router", "tokenizer", "scheduler", "worker", "frontend")
KINDS = ("kill", "kill", "stop", "two", "pause", "late", "late", "add", "remove", "crash")
ADDABLE = ("tokenizer", "frontend", "engine")
MOST_ADDED = 3
FIRST_ENGINE = 100
"""Number of the first engine that is added by hand."""
LONGEST_PAUSE = 2.0
"""Seconds; after 3 without a beat a process is lost."""

Group = list[OneProcess]
"""One process, or the two of an engine."""


class Mishaps:
    """One at a time, by the seed; each waits until the server is whole again."""

    def __init__(self, server: Served, model: Path, settings: dict[str, str], seed: int) -> None:
        """``settings``: what the server was started with, as PENSTOCK_… variables."""
        self.happened: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = defaultdict(list)
        """Seconds by kind, from the mishap until the server was whole again."""
        self.frontends_struck = 0
        """Only their clients may lose a connection."""
        self._server = server
        self._rng = random.Random(seed)
        self._environment = {
            **os.environ,
            **settings,
            "PENSTOCK_ROUTER": server.router,
            "PENSTOCK_MODEL": str(model),
            "PENSTOCK_PORT": str(urlsplit(server.url).port),
            "PENSTOCK_LOG_FORMAT": "json",
        }
        self._added: dict[str, Group] = {}
        """By name: the service, for an engine with its number."""
        self._engines = FIRST_ENGINE
        self._count = len(children(server))

    def one(self) -> None:
        kind = self._rng.choice(KINDS)
        if kind in ("remove", "crash") and not self._added:
            kind = "add"
        if kind == "add" and len(self._added) == MOST_ADDED:
            kind = "remove"
        began = time.monotonic()
        victims = []
        match kind:
            case "kill" | "stop" | "two":
                victims = self._strike(kind)
            case "pause":
                self._pause()
            case "late":
                self._come_late()
            case "add":
                self._add()
            case _:
                self._end(self._any_added(), signal.SIGTERM if kind == "remove" else signal.SIGKILL)
        seconds = whole_again(self._server, victims, self._count, began)
        self.happened[kind] += 1
        self.seconds[kind].append(seconds)

    def end(self) -> None:
        """Take away what was added."""
        for name in list(self._added):
            self._end(name, signal.SIGTERM)

    def close(self) -> None:
        """Leave nothing behind, whatever went wrong."""
        for group in self._added.values():
            for one in group:
                if one.process.poll() is None:
                    one.process.kill()
                    one.process.wait(10)

    # --- the launcher's processes

    def _strike(self, kind: str) -> list[psutil.Process]:
        roles = self._rng.sample(ROLES, 2 if kind == "two" else 1)
        victims = [self._find(role) for role in roles]
        self.frontends_struck += "frontend" in roles
        for victim in victims:
            victim.send_signal(signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
            time.sleep(self._rng.random() * 0.2)
        return victims

    def _pause(self) -> None:
        """Too short a stop for anyone to be declared lost."""
        victim = self._find(self._rng.choice(ROLES))
        victim.send_signal(signal.SIGSTOP)
        time.sleep(self._rng.random() * LONGEST_PAUSE)
        victim.send_signal(signal.SIGCONT)

    def _find(self, role: str) -> psutil.Process:
        return find(self._server, role, 0 if role == "router" else self._rng.randrange(2))

    # --- those added by hand

    def _any_added(self) -> str:
        return self._rng.choice(sorted(self._added))

    def _add(self) -> str:
        service = self._rng.choice([one for one in ADDABLE if one not in self._added])
        self._engines += service == "engine"
        self._added[service] = self._start(service)
        return service

    def _start(self, service: str) -> Group:
        if service == "engine":
            flags = ["--engine", str(self._engines)]
            group = [OneProcess(one, flags, self._environment) for one in ("scheduler", "worker")]
        else:
            group = [OneProcess(service, [], self._environment)]
        deadline = time.monotonic() + PATIENCE
        while not {one.process.pid for one in group} <= members(self._server.url):
            for one in group:
                assert one.process.poll() is None, one.output
            assert time.monotonic() < deadline, [one.output for one in group]
            time.sleep(0.05)
        return group

    def _end(self, name: str, number: int) -> None:
        group = self._added.pop(name)
        self.frontends_struck += name == "frontend" and number == signal.SIGKILL
        for one in group:
            one.send(number)
            code = one.ends()
            assert code == (0 if number == signal.SIGTERM else -number), one.output

    def _come_late(self) -> None:
        """Stopped, declared lost, replaced, and on again: it has no say any more, and ends."""
        name = self._any_added() if self._added else self._add()
        late = self._added[name]
        self.frontends_struck += name == "frontend"
        for one in late:
            one.send(signal.SIGSTOP)
        try:
            self._added[name] = self._start(name)
            until(
                lambda: not ({one.process.pid for one in late} & members(self._server.url)),
                PATIENCE,
                told="a stopped process is still a member",
            )
        finally:
            for one in late:
                one.send(signal.SIGCONT)
        for one in late:
            assert one.ends() == FENCED, one.output
