"""The processes of one server, each started by hand as a container platform would: no launcher."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO

import psutil
from support.chaos.victims import is_ready, members
from support.polling import until

PATIENCE = 60.0
FENCED = 5
"""Exit code of a process that was declared lost."""


class OneProcess:
    """A process of a service with all that it says."""

    def __init__(self, service: str, arguments: list[str], environment: dict[str, str]) -> None:
        self.service = service
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.services", service, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        assert self.process.stdout is not None
        threading.Thread(target=self._read, args=[self.process.stdout], daemon=True).start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.lines.append(line.rstrip())

    @property
    def output(self) -> str:
        return f"{self.service} {self.process.pid}:\n" + "\n".join(self.lines[-30:])

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def ends(self, seconds: float = PATIENCE) -> int:
        """The exit code. Raises ``AssertionError`` when it does not end in time."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {seconds:.0f} s: {self.output}") from None


class ByHand:
    """A server whose processes nobody restarts but the test."""

    def __init__(self, **settings: str) -> None:
        """``settings``: PENSTOCK_… variables, for every process alike."""
        # Not below pytest's folder: the path of an ipc socket has at most 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="p"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        names = {f"PENSTOCK_{name.upper()}": value for name, value in settings.items()}
        self._environment = {
            **os.environ,
            **names,
            "PENSTOCK_ROUTER": f"ipc://{self.folder}/router.sock",
            "PENSTOCK_PORT": str(port),
            "PENSTOCK_LOG_FORMAT": "json",
        }
        self.processes: list[OneProcess] = []
        self.members: dict[str, OneProcess] = {}
        """The process of each service that should be at work."""

    def start(self, service: str, *flags: str) -> OneProcess:
        self.processes.append(OneProcess(service, list(flags), self._environment))
        return self.processes[-1]

    def start_all(self) -> None:
        """One process of each service; returns when the server is ready."""
        for service in ("router", "tokenizer", "scheduler", "worker", "frontend"):
            self.members[service] = self.start(service)
        self.wait_ready()
        assert self.lost() == [], self.output

    def lost(self) -> list[str]:
        """Services whose process is not at work any more."""
        return [s for s, one in self.members.items() if one.process.poll() is not None]

    def known(self) -> set[int]:
        """The pids of the members that are ready, as the router says."""
        return members(self.url)

    def wait_ready(self) -> None:
        until(lambda: is_ready(self.url), PATIENCE, told=lambda: self.output)

    @property
    def output(self) -> str:
        return "\n\n".join(process.output for process in self.processes)

    def close(self) -> None:
        for one in self.processes:
            if one.process.poll() is None:
                with contextlib.suppress(psutil.Error):
                    one.send(signal.SIGKILL)
                one.process.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)
