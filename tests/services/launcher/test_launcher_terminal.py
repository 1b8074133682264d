"""``penstock serve`` on a terminal: what its user reads, from the first line to the last."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import pty
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import msgspec
import psutil
import pytest
from support.polling import until

PATIENCE = 30.0
ESCAPE = re.compile(r"\x1b\[[\d;]*[mK]")
LINE = re.compile(r"\d\d:\d\d:\d\d\.\d{3}  (debug|info |warn |error)  (.{11})  (.+)")
KEY = "s3cret-key"


class OnTerminal:
    """One ``penstock serve`` whose user sits at a terminal of 120 columns."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.folder = tempfile.mkdtemp(prefix="p")
        self.raw = b""
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("PENSTOCK_", "NO_COLOR"))}
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.services", "serve", "--port", "0", *arguments],
            env={**kept, "XDG_RUNTIME_DIR": self.folder, "TERM": "xterm", **environment},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # nobody writes any more
            while data := os.read(self._master, 65536):
                self.raw += data

    @property
    def text(self) -> str:
        """Without colour, and without what a carriage return has drawn over."""
        lines = self.raw.decode().replace("\r\n", "\n").split("\n")
        return ESCAPE.sub("", "\n".join(line.rpartition("\r")[2] for line in lines))

    def said(self, text: str) -> OnTerminal:
        until(lambda: text in self.text or self.process.poll() is not None)
        assert text in self.text, self.text
        return self

    @property
    def url(self) -> str:
        found = re.search(r"Page +(http://\S+)/", self.text)
        assert found, self.text
        return found[1]

    def ask(self, **fields: Any) -> Any:
        """The open stream of an answer."""
        body = {"prompt": "hello", "ignore_eos": True, "stream": True, **fields}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        request = urllib.request.Request(
            self.url + "/v1/completions", msgspec.json.encode(body), headers
        )
        return urllib.request.urlopen(request, timeout=PATIENCE)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        os.close(self._master)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def shown() -> Iterator[OnTerminal]:
    """A server that is ready. Tests look at what its user reads; the last one interrupts it."""
    server = OnTerminal(
        *("--device", "null", "--null-step-ms", "50", "--api-key", KEY, "--drain-timeout-s", "20")
    )
    try:
        yield server.said("Ctrl-C stops")
    finally:
        server.close()


def test_every_line_before_the_block_has_one_format_and_one_clock(shown: OnTerminal) -> None:
    before = shown.text.partition("\nPenstock is ready")[0].strip().splitlines()
    found = [LINE.fullmatch(line) for line in before]
    assert all(found), before
    said = {(line[2].strip(), line[3]) for line in found if line}
    for process in ("router", "tokenizer 0", "scheduler 0", "worker 0", "frontend 0"):
        assert (process, "ready") in said
    times = [seconds_of(line[:12]) for line in before]
    # A line of another process may come after one that was written later; a clock of another zone
    # would be half an hour apart.
    behind = [first - second for first, second in itertools.pairwise(times)]
    assert max(behind) < 60 or times[0] > times[-1]  # past midnight


def seconds_of(clock: str) -> float:
    hours, minutes, seconds = clock.split(":")
    return 3600 * int(hours) + 60 * int(minutes) + float(seconds)


def test_members_and_executors_are_left_to_the_level_debug(shown: OnTerminal) -> None:
    assert "joined" not in shown.text
    assert "executor" not in shown.text
    assert "{" not in shown.text.partition("\nPenstock is ready")[0]


def test_a_terminal_gets_colour(shown: OnTerminal) -> None:
    assert b"\x1b[32minfo\x1b[0m" in shown.raw


def test_the_block_names_the_page_first_then_the_api_and_the_model(shown: OnTerminal) -> None:
    block = shown.text.partition("Penstock is ready after ")[2]
    rows = dict(re.findall(r"^  (\w+) +(\S.*)$", block, re.M))
    names = list(rows)
    assert names[:6] == ["Page", "API", "Model", "Device", "Type", "Context"]
    assert rows["API"] == f"{shown.url}/v1"
    assert rows["Model"].startswith("penstock-demo ")
    assert rows["Device"] == "null"
    assert rows["Type"] == "bfloat16"
    assert rows["Context"].startswith("2,048 tokens")


def test_the_curl_of_the_block_works_and_shows_no_key(shown: OnTerminal) -> None:
    assert KEY not in shown.text
    line = next(line for line in shown.text.splitlines() if line.strip().startswith("curl "))
    words = shlex.split(line)
    headers = [words[i + 1] for i, word in enumerate(words) if word == "-H"]
    request = urllib.request.Request(words[1], words[words.index("-d") + 1].encode())
    for header in headers:
        name, _, value = header.partition(": ")
        request.add_header(name, value.replace("$PENSTOCK_API_KEY", KEY))
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        body = msgspec.json.decode(answer.read())
    assert body["choices"][0]["message"]["role"] == "assistant"


def test_ctrl_c_ends_a_start_and_nothing_has_colour_where_that_is_not_wanted() -> None:
    server = OnTerminal("--device", "null", NO_COLOR="1")
    try:
        server.said("starts 5 processes")
        started = psutil.Process(server.process.pid).children
        until(lambda: started(recursive=True))
        children = started(recursive=True)
        server.interrupt()
        assert server.process.wait(PATIENCE) == 0, server.text
        assert "Penstock is ready" not in server.text
        assert psutil.wait_procs(children, PATIENCE)[1] == []
        assert os.listdir(server.folder) == []
        assert b"\x1b[3" not in server.raw, "NO_COLOR is set"
    finally:
        server.close()


def test_ctrl_c_says_how_many_requests_run_and_how_long_it_waits(shown: OnTerminal) -> None:
    server = shown
    answers = [server.ask(max_tokens=100) for _ in range(2)]  # both were accepted
    server.interrupt()
    server.said("running requests have 20 s to finish (--drain-timeout-s)")
    server.said("a second Ctrl-C ends at once")
    server.said("2 requests run; ")
    assert server.process.wait(PATIENCE) == 0
    for answer in answers:
        with answer:
            assert answer.read().endswith(b"data: [DONE]\n\n")
    server.said("stopped after")
