"""Logs: one line an event, bounded values, and a reader who does not read costs only lines."""

from __future__ import annotations

import fcntl
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.polling import until
from support.protocol.forks import Forks

Run = Callable[..., list[dict[str, Any]]]
ROOT = Path(__file__).parents[2]
START = "from penstock.protocol.process import logs; log = logs.set_up('worker', 'info', 'json')\n"


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a program that logs, after its first lines. Returns what it has logged."""
    forks = Forks("support.protocol.programs", "penstock.protocol.process.logs")
    yield lambda body, start=START: logged(forks, f"{start}{body}\nlogs.flush()")
    forks.close()


def logged(forks: Forks, program: str) -> list[dict[str, Any]]:
    process = forks.start("support.protocol.programs", "execute", program)
    _, text = process.communicate()
    assert process.wait() == 0, text
    assert "Traceback" not in text.splitlines(), text
    return [json.loads(line) for line in text.split("\n")[:-1]]


def test_a_line_says_who_when_how_grave_and_what(run: Run) -> None:
    (line,) = run("log.warning('it happened', step=7)")
    assert (line["event"], line["level"], line["step"]) == ("it happened", "warning", 7)
    assert line["service"] == "worker"
    assert isinstance(line["pid"], int)
    assert line["timestamp"].endswith("Z")


def test_lines_about_a_request_name_it_and_its_trace_whoever_writes_them(run: Run) -> None:
    body = (
        "import logging\n"
        "from penstock.protocol.trace_context import line_fields\n"
        "fields = line_fields('req-1', '00-' + 'ab' * 16 + '-00f067aa0ba902b7-01')\n"
        "logging.getLogger('penstock.ownership').error('x', extra=fields)\n"
        "logging.getLogger('aiohttp').error('y')\n"
        "log.error('z', **line_fields('req-2', ''))"
    )
    named = [(line.get("id"), line.get("trace")) for line in run(body)]
    assert named == [("req-1", "ab" * 16), (None, None), ("req-2", None)]


def test_the_level_filters(run: Run) -> None:
    body = "log.debug('a'); log.info('b'); log.warning('c'); log.error('d')"
    assert [line["event"] for line in run(body)] == ["b", "c", "d"]
    start = START.replace("'info'", "'error'")
    assert [line["event"] for line in run(body, start)] == ["d"]
    start = START.replace("'info'", "'debug'")
    assert [line["event"] for line in run(body, start)] == ["a", "b", "c", "d"]


NASTY = [
    "two\nlines\r\nand more",
    "\x00\x01\x1b[31mred\x1b[0m\x7f\x85",
    "\u2028\u2029\u202e",
    "\ud800 lone surrogate",
    "%s %n {0} {}",
    '"}{"event": "forged"}',
    "é€𝄞",
]


def test_whatever_is_in_a_value_it_stays_one_line(run: Run) -> None:
    body = f"for text in {NASTY!r}: log.info(text, value=text, key=[text, {{'a': text}}])"
    lines = run(body)
    assert [line["event"] for line in lines] == NASTY
    assert [line["value"] for line in lines] == NASTY
    assert [line["key"][0] for line in lines] == NASTY


def test_values_that_json_does_not_know_are_described(run: Run) -> None:
    (line,) = run("log.info('x', a=b'raw', b={1, 2}, c=object, d=ValueError('bad'), e=None)")
    assert "raw" in line["a"]
    assert line["d"] == "ValueError('bad')"
    assert line["e"] is None


def test_a_long_value_is_cut(run: Run) -> None:
    values = ["'x' * 10**6", "['x' * 10] * 10**5", "b'x' * 10**6", "{n: n for n in range(10**5)}"]
    lines = run("\n".join(f"log.info('long', value={value}, other='short')" for value in values))
    assert len(lines) == len(values)
    for line in lines:
        assert len(json.dumps(line)) < 5000
        assert line["value"].endswith("…")
        assert line["other"] == "short"


def test_of_a_long_traceback_the_end_is_kept(run: Run) -> None:
    (line,) = run(
        "def deep(n):\n    if n: deep(n - 1)\n    else: raise ValueError('the cause')\n"
        "def other(n):\n    deep(0) if not n else [other(n - 1)]\n"
        "try:\n    [other(n) for n in (100,)]\n"
        "except ValueError:\n    log.exception('failed')"
    )
    assert line["event"] == "failed"
    assert line["exception"].endswith("ValueError: the cause")
    assert len(line["exception"]) < 5000


def test_libraries_are_logged_the_same_way(run: Run) -> None:
    lines = run(
        "import logging\n"
        "lib = logging.getLogger('some.library')\n"
        "lib.info('not shown'); lib.warning('shown %s', 'here'); lib.log(35, 'odd level')\n"
        "lib.critical('worst')\n"
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    lib.exception('with its cause')\n"
        "lib.warning('%d', 'not a number')\n"
        "lib.warning('after')"
    )
    events = [(line["event"], line["level"]) for line in lines]
    assert events[:4] == [
        ("shown here", "warning"),
        ("odd level", "warning"),
        ("worst", "critical"),
        ("with its cause", "error"),
    ]
    assert "ZeroDivisionError" in lines[3]["exception"]
    assert events[5:] == [("after", "warning")]
    assert {line["library"] for line in lines} == {"some.library"}


def test_the_console_style_is_for_people() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            START.replace("'json'", "'console'") + "log.info('hello', step=7)\nlogs.flush()",
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert "hello" in done.stderr
    assert "step=7" in done.stderr
    assert not done.stderr.startswith("{")


FLOOD = (
    START
    + """
import time
slow = 0
for number in range(20_000):
    began = time.perf_counter()
    log.info('line', number=number, text='x' * 200)
    slow += time.perf_counter() - began > 0.25
print(slow, flush=True)
input()
log.warning('after')
logs.flush(); logs.flush(); logs.flush()
"""
)


def test_lines_that_come_close_together_are_written_at_once(run: Run) -> None:
    """To wake the thread that writes, and the launcher that reads, costs more than a line."""
    body = (
        "import os; put, writes = os.write, []\n"
        "os.write = lambda fd, data: (writes.append(len(data)), put(fd, data))[1]\n"
        "for n in range(40): log.info('line', n=n)\n"
        "logs.flush(); log.info('end', writes=len(writes))"
    )
    *lines, end = run(body)
    assert [line["n"] for line in lines] == list(range(40))
    assert 1 <= end["writes"] < 20


def test_an_unread_pipe_never_blocks_and_the_lines_lost_are_counted() -> None:
    """Measured elsewhere: an unread stderr pipe froze a whole event loop."""
    process = subprocess.Popen(
        [sys.executable, "-c", FLOOD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    # Other processes may hold up a few of the calls; the pipe is full for nearly all of them.
    assert int(process.stdout.readline()) < 20, "log calls waited for the reader"
    _, log = process.communicate(b"\n", timeout=60)
    lines = [json.loads(line) for line in log.decode().splitlines()]
    told = sum(line.get("lines", 0) for line in lines if line["event"] == "log lines dropped")
    written = [line["number"] for line in lines if line["event"] == "line"]
    assert told > 1000
    assert written == sorted(written)
    after = sum(line["event"] == "after" for line in lines)
    assert len(written) + after + told == 20_001


def test_a_process_ends_though_nobody_reads_its_log() -> None:
    body = START + "for n in range(10000): log.info('x' * 500)\nlogs.flush()"
    process = subprocess.Popen([sys.executable, "-c", body], stderr=subprocess.PIPE, cwd=ROOT)
    assert process.wait(60) == 0
    assert process.stderr is not None
    process.stderr.close()


def test_a_non_blocking_pipe_gets_whole_lines() -> None:
    """Some parents hand their children such a descriptor."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETFL, fcntl.fcntl(writing, fcntl.F_GETFL) | os.O_NONBLOCK)
    body = START + "for n in range(1500): log.info('line', n=n, text='x' * 1500)\n"
    body += "logs.flush(); logs.flush(); logs.flush()"
    process = subprocess.Popen([sys.executable, "-c", body], stderr=writing, cwd=ROOT)
    until(lambda: not select.select([], [writing], [], 0.0)[1], told="the pipe is never full")
    os.close(writing)
    with os.fdopen(reading, "rb") as reader:
        lines = [json.loads(line) for line in reader.read().splitlines()]
    assert process.wait(60) == 0
    assert [line["n"] for line in lines] == list(range(1500))


def test_a_closed_log_costs_nothing_else() -> None:
    body = START + "import os; os.close(2)\nfor n in range(100): log.info('x')\nlogs.flush()\n"
    done = subprocess.run(
        [sys.executable, "-c", body + "print('done')"], capture_output=True, cwd=ROOT, timeout=60
    )
    assert done.stdout == b"done\n"
    if Path("/dev/full").exists():
        with Path("/dev/full").open("wb") as full:
            body = START + "for n in range(100): log.info('x')\nlogs.flush()\nprint('done')"
            done = subprocess.run(
                [sys.executable, "-c", body],
                stdout=subprocess.PIPE,
                stderr=full,
                cwd=ROOT,
                timeout=60,
            )
        assert done.stdout == b"done\n"


def test_a_worker_does_not_import_rich_because_it_is_installed_and_can_all_the_same() -> None:
    """Of the other services the import rules show it."""
    pytest.importorskip("rich")
    code = "import penstock.services.worker.service, sys; assert 'rich' not in sys.modules; "
    done = subprocess.run(
        [sys.executable, "-c", code + "import rich; rich.print('there')"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "there\n", done.stderr
