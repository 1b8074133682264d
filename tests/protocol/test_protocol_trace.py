"""The recorder of a process: what it keeps, when it ends, and what it costs."""

from __future__ import annotations

import ast
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.counted import instructions

from penstock.protocol.process import trace
from penstock.protocol.process.trace import EVENT, MAX_SECONDS, NAMES, PLAN, RING_EVENTS, Recorder
from penstock.protocol.wire.messages.membership import Fenced, Trace, Traced

ROOT = Path(__file__).resolve().parents[2]
OBSERVER = "ipc:///o"
FAR_BELOW_A_STEP = 60
"""Instructions of the interpreter: 20 make 0.35 µs."""


def recording(seconds: float = 1.0) -> Recorder:
    recorder = Recorder()
    assert recorder.ask(Trace(OBSERVER, seconds), 100.0) is None
    return recorder


def pieces(recorder: Recorder, now: float) -> Iterator[Traced]:
    while recorder.observer:
        piece = recorder.next_piece(now)
        assert piece is not None
        yield piece


def events(found: list[Traced]) -> list[tuple[int, ...]]:
    return [event for piece in found for event in EVENT.iter_unpack(piece.events)]


def test_what_is_recorded_comes_back_with_its_name_lane_and_number() -> None:
    recorder = recording()
    recorder.add(PLAN, 5, 77, 3, 9)
    recorder.add_message(Fenced(1), 6)
    found = list(pieces(recorder, 101.0))
    (first, second) = events(found)
    assert first == (5, 9, PLAN, 3, 77)
    assert NAMES[first[2]] == "plan"
    assert NAMES[second[2]] == "Fenced"
    assert 6 < second[1] <= time.monotonic_ns()
    assert found[0].names == NAMES


def test_a_recorder_that_nobody_asked_keeps_nothing() -> None:
    recorder = Recorder()
    assert not recorder.on
    recorder.add(PLAN, 5)
    assert recorder.ask(Trace(OBSERVER, 1.0), 0.0) is None
    assert events(list(pieces(recorder, 2.0))) == []


@pytest.mark.parametrize(
    ("asked", "ends"), [(2.0, 2.0), (1e9, MAX_SECONDS), (-5.0, 0.0), (float("nan"), 0.0)]
)
def test_it_ends_by_itself_whatever_was_asked_for(asked: float, ends: float) -> None:
    recorder = recording(asked)
    if ends:
        assert recorder.next_piece(100.0 + ends - 0.001) is None
        assert recorder.on
    found = list(pieces(recorder, 100.0 + ends))
    assert len(found) == 1
    assert not recorder.on
    recorder.add(PLAN, 5)
    assert recorder.observer == ""


def test_the_newest_events_are_kept_in_their_order_and_the_lost_ones_counted() -> None:
    recorder = recording()
    count = RING_EVENTS + 1000
    for number in range(count):
        recorder.add(PLAN, 1, number, 0, 2)
    found = list(pieces(recorder, 101.0))
    assert [event[4] for event in events(found)] == list(range(1000, count))
    assert {piece.dropped for piece in found} == {1000}
    assert [piece.more for piece in found] == [True] * (len(found) - 1) + [False]
    assert max(len(piece.events) for piece in found) <= 1 << 20


def test_a_second_observer_is_told_that_it_has_to_wait() -> None:
    recorder = recording()
    refusal = recorder.ask(Trace("ipc:///other", 1.0), 100.5)
    assert refusal is not None
    assert refusal.refused
    assert recorder.observer == OBSERVER
    list(pieces(recorder, 101.0))
    assert recorder.ask(Trace("ipc:///other", 1.0), 102.0) is None


def test_threads_that_record_at_the_same_time_lose_nothing() -> None:
    recorder = recording()

    def work(lane: int) -> None:
        for number in range(5000):
            recorder.add(PLAN, 1, number, lane, 2)

    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = events(list(pieces(recorder, 101.0)))
    for lane in range(4):
        assert [event[4] for event in found if event[3] == lane] == list(range(5000))


def test_an_event_costs_far_less_than_a_step() -> None:
    recorder = recording()
    for number in range(RING_EVENTS + 10):
        recorder.add(PLAN, time.monotonic_ns(), number)
    costs = [instructions(lambda: recorder.add(PLAN, time.monotonic_ns(), 1)) for _ in range(100)]
    assert 5 < max(costs) < FAR_BELOW_A_STEP


def guarded(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a call stands below ``if began`` (or ``if traced``), or below ``if TRACE.on`` where
    the clock is read anyway, and nothing else decides."""
    while node in parents:
        node = parents[node]
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name):
            return node.test.id in ("began", "traced")
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TRACE.on":
            return True
    return False


def test_without_tracing_a_place_that_records_does_one_check_and_no_more() -> None:
    """Every event is added below ``if began`` or ``if TRACE.on``."""
    seen = 0
    for path in [*sorted((ROOT / "services").rglob("*.py")), ROOT / "protocol/process/service.py"]:
        if path.name == "step_times.py":  # it is called for steps whose events were recorded
            continue
        source = path.read_text()
        if "TRACE." not in source:
            continue
        tree = ast.parse(source)
        parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("TRACE.add"):
                assert guarded(node, parents), f"{path}:{node.lineno}"
                seen += 1
            if isinstance(node, ast.IfExp) and "TRACE.on" in ast.unparse(node.test):
                assert ast.unparse(node.body) == "time.monotonic_ns()", f"{path}:{node.lineno}"
                assert ast.unparse(node.orelse) == "0"
    assert seen >= 7


def test_the_recorder_of_a_process_is_off_when_it_starts() -> None:
    assert not trace.TRACE.on
    assert trace.TRACE.observer == ""
