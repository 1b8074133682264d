"""A whole server for a test: `penstock serve` as real processes, and means to look at it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from penstock.protocol.keys.key_file import change_keys, line_of
from penstock.protocol.keys.record import Role, new_key

START_SECONDS = 90.0
TOLD_SECONDS = 1.0
"""What a process has counted is told by then: it travels in its beats, twice a second."""
BUILT_IN = ("--device", "cpu", "--dtype", "float32", "--grpc-port", "0")
"""The built-in model, of which two requests get the same text bit for bit."""
SMALL = ("--device", "cpu", "--dtype", "float32", "--max-num-seqs", "16")
"""With ``small_model``."""
VECTORS = (
    *("--device", "null", "--null-step-ms", "80", "--max-num-seqs", "64", "--grpc-port", "0"),
    *("--task", "embed", "--served-model-name", "vectors"),
)
NULL = ("--device", "null", "--null-step-ms", "10")
"""Flags of servers that several files share."""
ONE_THREAD = {"PENSTOCK_THREADS": "1"}
"""For a worker on the CPU, which else times steps with every number of threads. Several tests run
at once: threads that wait for each other would take many times as long."""

BUSY = (
    "penstock_requests_running",
    "penstock_requests_waiting",
    "penstock_queue_depth",
    "penstock_kv_blocks_used",
)
"""Metrics that are 0 where nothing runs or waits."""


class Served:
    """One running server."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.lines: list[str] = []
        self._began = time.monotonic()
        threads = {} if "null" in arguments else ONE_THREAD
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.services", "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PENSTOCK_LOG_FORMAT": "json", **threads, **(environment or {})},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self.find(r"(https?://[\d.]+:\d+)/v1")
        self.router = self.find(r'"router": "((?:ipc|tcp)://[^"]+)"')
        self.ready_after = time.monotonic() - self._began

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def find(self, pattern: str) -> str:
        """The first group of a pattern where it first matches the output, once it does."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            found = re.search(pattern, self.output)
            if found:
                return found[1]
            if self.process.poll() is not None:
                self._reader.join(2)
                raise AssertionError(f"serve ended with {self.process.returncode}:\n{self.output}")
            time.sleep(0.02)
        self.kill()
        raise AssertionError(f"serve did not say {pattern!r} in time:\n{self.output}")

    def processes(self) -> dict[int, psutil.Process]:
        """All processes of the server, the launcher included."""
        root = psutil.Process(self.process.pid)
        return {p.pid: p for p in (root, *root.children(recursive=True))}

    def lasting(self) -> set[int]:
        """The processes without the helper that vets grammars, which comes with the first one."""
        found = set[int]()
        for pid, process in self.processes().items():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "grammar" not in " ".join(process.cmdline()):
                    found.add(pid)
        return found

    def role_of(self, process: psutil.Process) -> str:
        command = process.cmdline()
        text = " ".join(command)
        for role in ("frontend", "tokenizer", "router", "scheduler", "worker"):
            if role in text:
                return role
        return "launcher"

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, summed over its labels; histograms by their _count and _sum."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=60) as answer:
            text = answer.read().decode()
        found: dict[str, float] = {}
        for line in text.splitlines():
            if line.startswith("#") or "_bucket" in line:
                continue
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def settled(self, seconds: float = 60.0) -> dict[str, float]:
        """The metrics once nothing runs or waits any more."""
        time.sleep(TOLD_SECONDS)
        deadline = time.monotonic() + seconds
        while True:
            metrics = self.metrics()
            busy = any(metrics.get(name, 0.0) for name in BUSY)
            if not busy or time.monotonic() > deadline:
                return metrics
            time.sleep(0.1)

    def post(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and body of the answer to a JSON body."""
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **(headers or {})},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def stop(self, seconds: float = 60.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"serve did not stop:\n{self.output[-4000:]}") from None

    def kill(self) -> None:
        for process in self.processes().values() if self.process.poll() is None else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(30)


@contextlib.contextmanager
def served(*arguments: str, environment: dict[str, str] | None = None) -> Iterator[Served]:
    """Run a server for a block; it must stop cleanly at the end."""
    with stopping(Served(*arguments, environment=environment)) as server:
        yield server


@contextlib.contextmanager
def stopping(server: Served) -> Iterator[Served]:
    """Stop a server behind a block, cleanly; where the block fails, show what it wrote."""
    try:
        yield server
    except BaseException:
        print(server.output[-8000:])
        server.kill()
        raise
    assert server.stop() == 0, server.output[-4000:]


def added_key(path: Path, name: str, role: Role = "user") -> str:
    """A key that the file at ``path`` holds from now on."""
    key, record = new_key(name, role)
    change_keys(path, lambda lines: [*lines, line_of(record)])
    return key


class SharedServers:
    """Servers that the files of a test process share, each by its flags and environment.

    For tests that only send requests: who drains, fills or reconfigures a server, or reads counters
    that begin at zero, runs one of its own by ``served``. Who kills a process waits until another
    one has its place, and says so by ``renewed``.
    """

    def __init__(self, group: ExitStack, most: int = 2) -> None:
        """most: so many run at a time; the one that was asked for longest ago ends first, and with
        the group all end."""
        self._group = group
        self._most = most
        self._servers: dict[tuple[Any, ...], tuple[Served, set[int]]] = {}

    def __call__(self, *arguments: str, environment: dict[str, str] | None = None) -> Served:
        """The running server with these flags, idle and with the processes that it began with."""
        key = (arguments, tuple(sorted((environment or {}).items())))
        found = self._servers.pop(key, None)
        if found is None:
            while len(self._servers) >= self._most:
                self._stop(next(iter(self._servers)))
            server = Served(*arguments, environment=environment)
            self._group.callback(self.close)
            found = server, server.lasting()
        else:
            server, born = found
            assert server.process.poll() is None, server.output[-4000:]
            assert server.lasting() == born, server.output[-4000:]
            metrics = server.settled()
            assert not any(metrics.get(name) for name in BUSY), metrics
        self._servers[key] = found
        return server

    def renewed(self, server: Served) -> None:
        """Called by a test that has killed processes of the server: others have their places."""
        for key, (running, born) in self._servers.items():
            if running is server:
                assert len(server.lasting()) == len(born), server.output[-4000:]
                self._servers[key] = server, server.lasting()

    @contextlib.contextmanager
    def ending(self, *arguments: str) -> Iterator[Served]:
        """The server with these flags for a test that ends it: who asks for it later gets a new
        one."""
        server = self(*arguments)
        self._servers = {key: of for key, of in self._servers.items() if of[0] is not server}
        with stopping(server):
            yield server

    def _stop(self, key: tuple[Any, ...]) -> None:
        server, _ = self._servers.pop(key)
        code = server.stop()
        assert code == 0, server.output[-4000:]

    def close(self) -> None:
        while self._servers:
            self._stop(next(iter(self._servers)))


def start_service(server: Served, service: str, *arguments: str) -> subprocess.Popen[str]:
    """One more process beside a running server, started by hand."""
    return subprocess.Popen(
        [sys.executable, "-m", "penstock.services", service, "--router", server.router, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def leftovers(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*")) if folder.exists() else []
