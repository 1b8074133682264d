"""A test waits for what it is about: an event, a message behind, what a poll sees, or the time of a
clock of its own. A fixed time is too short on a slow machine and too long on all others.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
SHORT_SECONDS = 0.2
"""A rest between two looks is shorter."""
HANG_SECONDS = 60.0
"""Whoever rests for so long hangs for the test, which ends it before."""
CALLED = ("sleep", "wait_for_timeout", "Event().wait")
MILLISECONDS = {"wait_for_timeout"}
"""Of Playwright; the others take seconds."""
REAL = {
    "chaos/test_chaos_network.py BEGUN_SECONDS": "requests are to be in their middle",
    "chaos/test_chaos_rounds.py RETRY_SECONDS": "how often a client comes back",
    "loadtest/test_loadtest_bench_serve.py ENDED_SECONDS": "what a client knows of is not seen",
    "pipeline/test_pipeline_beams.py BEGUN_SECONDS": "a search is to be in its middle",
    "pipeline/test_pipeline_limits.py LOAD_SECONDS": "load with and without a server of limits",
    "pipeline/test_pipeline_playground.py SELDOM_MS": "how seldom a page asks, by its own timers",
    "pipeline/test_pipeline_playground.py HIDDEN_MS": "that a hidden page never asks",
    "pipeline/test_pipeline_ranks_on_hosts.py BEGUN_SECONDS": "streams are to be in their middle",
    "protocol/test_protocol_services.py ALONE_SECONDS": "processes are to wait for a router",
    "security/test_security_access.py TOLD_SECONDS": "counters come in the beats of others",
    "services/launcher/test_launcher_serve.py IDLE_SECONDS": "how often an idle process wakes",
    "services/launcher/test_launcher_serve.py SECOND_SIGNAL_SECONDS": "a process tells two signals "
    "apart by its own clock",
    "support/conformance/conversation_apis.py RETRY_SECONDS": "how often a client comes back",
    "support/deploy/local_cluster.py LOOK_SECONDS": "each look starts many processes",
    "support/pipeline/served.py TOLD_SECONDS": "counters come in the beats of other processes",
    "support/tokenizer/ruinous_grammars.py NAP_SECONDS": "a helper is busy for some time",
}
"""Waits that are real, each of a constant that says more: what passes is the subject, or the clock
is another process's."""


def waits(text: str) -> Iterator[tuple[int, str]]:
    """Line and length of each wait for a fixed time, a number or the name of a constant, that is
    neither short nor for ever."""
    if not any(f"{name}(" in text for name in CALLED):
        return  # most files, which need not be parsed
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and (length := length_of(node)) is not None:
            yield node.lineno, length


def length_of(call: ast.Call) -> str | None:
    name = name_of(call.func)
    is_wait = name == "sleep" or name in MILLISECONDS or waits_for_nobody(call.func)
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    if not (is_wait and given and is_fixed(given[0])):
        return None
    match given[0]:
        case ast.Constant(value=float() | int() as number):
            seconds = number / 1000 if name in MILLISECONDS else number
            return str(number) if SHORT_SECONDS <= seconds < HANG_SECONDS else None
    return ast.unparse(given[0])


def name_of(function: ast.expr) -> str:
    """Of what is called, without its module or object."""
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def waits_for_nobody(function: ast.expr) -> bool:
    """``Event().wait``: nobody can set the event."""
    match function:
        case ast.Attribute(value=ast.Call(func=made), attr="wait"):
            return name_of(made) == "Event"
    return False


def is_fixed(length: ast.expr) -> bool:
    """Whether it is made of numbers and of constants, whose names have no small letters."""
    match length:
        case ast.Constant(value=value):
            return isinstance(value, int | float)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.isupper()
        case ast.BinOp(left=left, right=right):
            return is_fixed(left) and is_fixed(right)
    return False


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("time.sleep(0.2)", "0.2"),
        ("await asyncio.sleep(delay=2)", "2"),
        ("gevent.sleep(PAUSE_SECONDS)", "PAUSE_SECONDS"),
        ("sleep(2 * served.BEAT_SECONDS + 0.1)", "2 * served.BEAT_SECONDS + 0.1"),
        ("threading.Event().wait(0.5)", "0.5"),
        ("page.wait_for_timeout(200)", "200"),
        ("page.wait_for_timeout(50)", ""),
        ("time.sleep(0.05)", ""),
        ("asyncio.sleep(3600)", ""),
        ("time.sleep(rng.random())", ""),
        ("stopped.wait(5)", ""),
        ("ended = process.wait(60)", ""),
    ],
)
def test_a_wait_for_a_fixed_time_is_seen(text: str, length: str) -> None:
    assert [found for _, found in waits(text)] == [length] * bool(length)


def test_no_test_waits_for_a_fixed_time_except_where_the_wait_is_real() -> None:
    found = {
        f"{path.relative_to(TESTS).as_posix()} {length}": line
        for path in sorted(TESTS.rglob("*.py"))
        for line, length in waits(path.read_text())
    }
    fixed = {f"tests/{where} in line {line}" for where, line in found.items() if where not in REAL}
    assert not fixed, "use tests/support/polling.py, an event or a clock of the test's own"
    assert found.keys() == REAL.keys(), "these waits are gone"
