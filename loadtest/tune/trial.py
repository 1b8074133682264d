"""A server with certain settings, and loads on it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil

from penstock.loadtest.own_server import own_server
from penstock.loadtest.process_cpu import cpu_of, service_of
from penstock.loadtest.tune.load_level import Level, put_load
from penstock.loadtest.tune.objective import Objective, Workload
from penstock.loadtest.tune.time_limit import TimeLimit
from penstock.loadtest.tune.written import written

LEAST_REQUESTS, MOST_REQUESTS = 6, 2000
LEAST_START_S = 5.0
"""A server is not started with less time left."""


class Trials:
    """Starts servers one after another, and counts what that takes."""

    def __init__(
        self,
        standing: Mapping[str, Any],
        objective: Objective,
        workload: Workload,
        limit: TimeLimit,
        folder: Path,
    ) -> None:
        """standing: settings by name, that hold for all; folder: for their files."""
        self._standing, self._objective, self._workload = dict(standing), objective, workload
        self._limit, self._folder = limit, folder
        self._loads = 0
        self.start_s = LEAST_START_S
        """How long the latest start took."""
        self.around_s = 0.0
        """How long the latest load took beside its requests."""

    @property
    def load_s(self) -> float:
        """How long requests arrive in a load, about."""
        return min(20.0, max(2.0, self._limit.seconds / 15))

    @contextlib.contextmanager
    def server(self, settings: Mapping[str, Any]) -> Iterator[Trial]:
        """With these settings beside the standing ones. Raises ``ServerFailed``, ``OutOfTime``."""
        left = self._limit.need(self.start_s, "the start of a server")
        path = self._folder / "trial.toml"
        path.write_text(written({**self._standing, **settings}))
        path.chmod(0o600)
        flags = ["--config", str(path), "--startup-timeout-s", f"{max(1.0, left):.0f}"]
        began = time.monotonic()
        with own_server(flags) as url:
            self.start_s = time.monotonic() - began
            yield Trial(self, url)

    def put(
        self, url: str, rate: float, requests: int, processes: Mapping[psutil.Process, str]
    ) -> Level:
        """A load, with what the processes took. Raises ``LoadFailed``."""
        self._loads += 1
        before, began = _cpu_of(processes), time.monotonic()
        level = put_load(
            url,
            self._objective,
            self._workload,
            rate=rate,
            requests=requests,
            seed=self._loads,
            limit_s=max(1.0, self._limit.left),
        )
        self.around_s = max(0.0, time.monotonic() - began - level.seconds)
        after = _cpu_of(processes)
        seconds = max(level.seconds, 1e-3)
        used = {name: (after[name] - before[name]) / seconds for name in before if name in after}
        return msgspec.structs.replace(level, cpu=used)

    def now(self, text: str) -> None:
        self._limit.now(text)


def _cpu_of(processes: Mapping[psutil.Process, str]) -> Mapping[str, float]:
    """Seconds by service; nothing where one of them has ended."""
    try:
        return cpu_of(processes)
    except psutil.NoSuchProcess:
        return {}


class Trial:
    """One running server."""

    def __init__(self, trials: Trials, url: str) -> None:
        self._trials, self._url = trials, url
        self._processes: dict[psutil.Process, str] = {}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                self._processes[process] = service_of(process)

    def alone(self, requests: int) -> Level:
        """Requests that wait for each other."""
        self._trials.now("load: one request at a time")
        return self._trials.put(self._url, 0.0, requests, self._processes)

    def level(self, rate: float) -> Level:
        """rate: requests a second."""
        self._trials.now(f"load: {rate:.3g} requests/s")
        wanted = round(rate * self._trials.load_s)
        requests = min(MOST_REQUESTS, max(LEAST_REQUESTS, wanted))
        return self._trials.put(self._url, rate, requests, self._processes)
