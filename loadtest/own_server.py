"""A server of our own for an evaluation: ``penstock serve`` on a free port."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

END_S = 30.0
_URL = re.compile(r"(https?://\S+?)/v1")


class ServerFailed(RuntimeError):
    """It did not start. The message holds what it printed."""


@contextlib.contextmanager
def own_server(arguments: Sequence[str]) -> Iterator[str]:
    """Start ``penstock serve`` with these flags; its URL. Raises ``ServerFailed``."""
    command = [sys.executable, "-m", "penstock.services", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        yield _url(process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _url(process: subprocess.Popen[str]) -> str:
    """Read up to the line that names the address; the rest is read and dropped."""
    stream = process.stdout
    if stream is None:
        raise ServerFailed("its output cannot be read")
    seen = []
    for line in stream:
        seen.append(line)
        if found := _URL.search(line):
            threading.Thread(target=stream.read, daemon=True).start()
            return found[1]
    raise ServerFailed(f"`penstock serve` ended with {process.wait()}:\n{''.join(seen).rstrip()}")
