"""What Python or a process does, counted: the same on each machine, however busy it is."""

from __future__ import annotations

import contextlib
import gc
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No search for garbage comes in between, nor what others have run at each."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def instructions(action: Callable[[], object]) -> int:
    """Instructions of the interpreter in all functions that ``action`` calls in this thread."""
    count = 0

    def see(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return see

    before = sys.gettrace()
    # Python 3.12 looks when tracing begins whether any frame has ever asked for instructions, and
    # sends none if not. This frame has no function that would see its own.
    sys._getframe().f_trace_opcodes = True
    with uncollected():
        sys.settrace(see)
        try:
            action()
        finally:
            sys.settrace(before)
    return count


def calls(action: Callable[[], object]) -> int:
    """Functions that ``action`` calls in this thread, of Python and of C."""
    count = 0

    def see(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    with uncollected():
        sys.setprofile(see)
        try:
            action()
        finally:
            sys.setprofile(before)
    return count


def wakes(pid: int) -> int:
    """How often the threads of a process have waited for something."""
    statuses = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    found = (re.search(r"^voluntary_ctxt_switches:\s*(\d+)", text, re.M) for text in statuses)
    return sum(int(count[1]) for count in found if count)


def cpu_seconds(pid: int) -> float:
    """Seconds of a processor that a process has used."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
