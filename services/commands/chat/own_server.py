"""A server for one conversation: started for a model, ended after it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

import msgspec

from penstock.protocol.config.terminal import Style
from penstock.protocol.process.console import ERASE_REST
from penstock.services.commands.failure import FAILED, CommandError
from penstock.services.commands.printable import one_line

END_S = 15.0
KEPT_LINES = 20
"""Of its output, for an error."""


@contextlib.contextmanager
def own_server(
    model: str, flags: Sequence[str], environment: Mapping[str, str], style: Style
) -> Iterator[str]:
    """Serve ``model``, or the built-in one where that is empty, on a free port of this host; gives
    the URL once it is ready. Unless sizes are given, it is one engine on the fewest GPUs.

    flags: further ones of ``penstock serve``. style: of standard error, where a line tells how far
    it is. Raises ``CommandError`` with the server's own last words.
    """
    command = [
        *(sys.executable, "-m", "penstock.services", "serve"),
        *flags,
        *([f"--model={model}"] if model else []),
        *("--host", "127.0.0.1", "--port", "0"),
        *("--log-format", "json", "--drain-timeout-s", "0"),
        *(f"--parent-pid={os.getpid()}", "--one-engine=1"),
    ]
    # In a session of its own: Ctrl-C interrupts an answer, not the server.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=dict(environment), start_new_session=True,
    )  # fmt: skip
    try:
        yield _url(process, model, style)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _url(process: subprocess.Popen[bytes], model: str, style: Style) -> str:
    """Read what it says up to where it is; the rest is read and dropped."""
    if process.stdout is None:
        raise ValueError("the server's standard output must be a pipe")
    seen: deque[str] = deque(maxlen=KEPT_LINES)
    _show(f"starting a server for {model or 'the built-in model'}", style, end="\n")
    for line in process.stdout:
        record = _record(line)
        if record.get("event") == "serving":
            _show("", style)
            threading.Thread(target=_drop, args=(process.stdout,), daemon=True).start()
            return str(record["url"])
        said = str(record.get("event") or line.decode("utf-8", "replace").rstrip())
        seen.append(said)
        if who := record.get("process"):
            _show(f"{who}: {said}", style)
        elif not record:  # of a download
            _show(said.removeprefix("penstock: "), style)
    _show("", style)
    words = "\n".join(one for one in seen if one.startswith("penstock: ")) or "\n".join(seen)
    raise CommandError(
        f"`penstock serve` ended with {process.wait()}:\n{words.replace('penstock: ', '')}",
        process.returncode or FAILED,
    )


def _record(line: bytes) -> dict[str, object]:
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _drop(stream: IO[bytes]) -> None:
    while stream.read(1 << 16):
        pass


def _show(text: str, style: Style, end: str = "") -> None:
    """The line of progress, drawn over the last one; without a terminal only what ends a line."""
    if style.cursor:
        columns = 78
        with contextlib.suppress(OSError):
            columns = os.get_terminal_size(2).columns - 1
        sys.stderr.write(f"\r{style.dim(one_line(text)[:columns])}{ERASE_REST}" + end)
        sys.stderr.flush()
    elif end:
        print(one_line(text), file=sys.stderr)
