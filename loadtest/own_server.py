"""A server of our own for a measurement: ``penstock serve`` on a free port."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from penstock.services.library.server_process import ServerFailed

END_S = 30.0
_URL = re.compile(r'"api": "(https?://\S+?)/v1"')


@contextlib.contextmanager
def own_server(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] = lambda line: None,
) -> Iterator[str]:
    """Start ``penstock serve`` with these flags; its URL. Raises ``ServerFailed``. It ends with the
    thread that calls this, also where a signal kills that. Unless sizes are given, it is one engine
    on the fewest GPUs, so that what is measured does not change with their number.

    environment: of the server instead of this process's; on_line: told each line that it prints
    until it is ready.
    """
    command = [sys.executable, "-m", "penstock.services", "serve", *arguments, "--port", "0"]
    command += ["--log-format", "json", "--parent-pid", str(os.getpid()), "--one-engine", "1"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env=environment,
    )  # fmt: skip
    try:
        yield _url(process, on_line)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _url(process: subprocess.Popen[str], on_line: Callable[[str], None]) -> str:
    """Read up to the line that names the address; the rest is read and dropped."""
    stream = process.stdout
    if stream is None:
        raise ServerFailed("its output cannot be read")
    seen = []
    for line in stream:
        seen.append(line)
        on_line(line)
        if found := _URL.search(line):
            threading.Thread(target=_drop, args=(stream,), daemon=True).start()
            return found[1]
    raise ServerFailed(f"`penstock serve` ended with {process.wait()}:\n{''.join(seen).rstrip()}")


def _drop(stream: Iterator[str]) -> None:
    """Read all that is still printed; a pipe that nobody reads would stop the server."""
    for _ in stream:
        pass
