"""Processes that begin in a moment: forks of one that has imported what they run.

Python and its imports take a small service longer than all that a test asks of it. With ``Forks``
they take that long once, and not for each process. ``python forks.py DESCRIPTOR MODULE…`` imports
the modules, then forks for each request that comes by the socket, and tells what has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
PATIENCE = 60.0
"""Seconds for anything that is to come, on a busy machine."""


class Forks:
    """Starts processes that have imported some modules; they are no children of this one."""

    def __init__(self, *modules: str) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": ".:tests"},
            )
        self._started: list[int] = []
        self.codes: dict[int, int] = {}
        """Process id → exit code of those that have ended; minus the signal that ended one."""

    def start(self, module: str, function: str, *arguments: Any, descriptor: int = 2) -> Fork:
        """A process that calls a function of a module with what JSON carries, and ends with what
        that returns. descriptor: 1 or 2, which of its outputs can be read here."""
        reading, writing = os.pipe()
        request = json.dumps([module, function, arguments, descriptor]).encode()
        socket.send_fds(self._control, [request], [writing])
        os.close(writing)
        deadline = time.monotonic() + PATIENCE
        while not self._started:
            assert time.monotonic() < deadline and self._server.poll() is None
            self.hear(1.0)
        return Fork(self, self._started.pop(), reading)

    def hear(self, seconds: float) -> None:
        """Waits for the next that is told of processes, at most so long."""
        while select.select([self._control], [], [], seconds)[0]:
            told = self._control.recv(1000)
            assert told, "the process that forks has ended"
            kind, pid, code = json.loads(told)
            if kind == "started":
                self._started.append(pid)
            else:
                self.codes[pid] = code
            seconds = 0.0

    def close(self) -> None:
        self._control.close()
        self._server.wait(PATIENCE)


@functools.cache
def shared_forks(*modules: str) -> Forks:
    """For all tests of this process that name the same modules: they end with it."""
    found = Forks(*modules)
    atexit.register(found.close)
    return found


class Fork:
    """One of them, with the names of ``subprocess.Popen``."""

    def __init__(self, forks: Forks, pid: int, output: int) -> None:
        self.pid = pid
        self.output = os.fdopen(output, "rb")
        """The pipe to which it writes."""
        self._forks = forks
        self._read = b""

    def poll(self) -> int | None:
        self._forks.hear(0.0)
        return self._forks.codes.get(self.pid)

    def wait(self, timeout: float = PATIENCE) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"the fork {self.pid}", timeout)
            self._forks.hear(min(1.0, timeout))
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = PATIENCE) -> tuple[None, str]:
        """Waits for the end. Returns (None, all that was written)."""
        deadline = time.monotonic() + timeout
        while not self.output.closed:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self.output], [], [], left)[0]:
                raise subprocess.TimeoutExpired(f"the fork {self.pid}", timeout)
            if piece := os.read(self.output.fileno(), 1 << 16):
                self._read += piece
            else:
                self.output.close()
        self.wait(max(0.1, deadline - time.monotonic()))
        return None, self._read.decode()


def serve(control: socket.socket) -> int:
    """Forks until the other end closes. Returns the exit code, of each fork as well."""
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    while True:
        ready = select.select([control, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            for pid, code in ended():
                with contextlib.suppress(BrokenPipeError):
                    control.send(json.dumps(["ended", pid, code]).encode())
        if control in ready:
            request, pipes, _, _ = socket.recv_fds(control, 1 << 18, 1)
            if not request:
                return 0
            module, function, arguments, descriptor = json.loads(request)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.dup2(pipes[0], descriptor)
                for one in (pipes[0], woken, wakes):
                    os.close(one)
                control.close()
                called = getattr(importlib.import_module(module), function)
                return int(called(*arguments) or 0)
            os.close(pipes[0])
            control.send(json.dumps(["started", pid, 0]).encode())


def ended() -> list[tuple[int, int]]:
    """Children that have ended, and their exit codes."""
    found = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            found.append((pid, os.waitstatus_to_exitcode(status)))
    return found


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    sys.exit(serve(socket.socket(fileno=int(sys.argv[1]))))
