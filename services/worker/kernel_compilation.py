"""A process of its own that compiles a model's kernels into Triton's cache, with several more.

    python -m penstock.services.worker.kernel_compilation PROCESSES SECONDS

Reads ``KernelNeeds`` as one line of JSON from standard input, finds out which kernels these are
(``gpu/needed_kernels.py``), and becomes several processes, which take one kernel after the other.
Prints a ``CompilationReport`` as one line of JSON. It needs no GPU and uses none; it ends when its
standard input does, as when whoever started it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.kernels.gpu.device_facts import pretend
from penstock.kernels.kernel_table import read_choice, use_choices
from penstock.protocol.process.parent_death import end_with_parent
from penstock.services.worker.kernel_cache import kernel_cache
from penstock.services.worker.kernel_needs import KernelNeeds
from penstock.services.worker.kernel_report import CompilationReport

if TYPE_CHECKING:
    from penstock.kernels.gpu.recorded_launches import Recorded, Recorder

_NICE = 5
"""Whoever waits for these kernels has work of its own meanwhile."""
_LOOK_SECONDS = 0.05
_ENTRY = 2
"""Bytes of a kernel's number in the pipe that the processes take from."""
_LINE = 4000
"""Bytes of a report at most: a pipe takes so many in one piece (PIPE_BUF)."""


class _Outcome(msgspec.Struct):
    """Of one kernel, as its process tells it."""

    name: str
    found: bool
    seconds: float
    failure: str = ""


def main() -> int:
    """Exit code 0 whenever a report was printed."""
    begun = time.monotonic()
    processes, deadline = int(sys.argv[1]), begun + float(sys.argv[2])
    needs = msgspec.json.decode(_line(0), type=KernelNeeds)
    if processes > 1:
        os.nice(_NICE)
    pretend(needs.device)
    use_choices(map(read_choice, needs.kernel_table))
    report = CompilationReport(processes=processes)
    with tempfile.TemporaryDirectory(prefix="penstock-kernels-") as folder:
        try:
            _compile(needs, report, begun, deadline, Path(folder))
        except Exception as failure:
            report.failures.append(f"{type(failure).__name__}: {str(failure)[:_LINE]}")
    report.seconds = round(time.monotonic() - begun, 2)
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.flush()
    return 0


def _line(descriptor: int) -> bytes:
    """Up to a newline, and not a byte more: what follows is waited for elsewhere."""
    text = b""
    while (byte := os.read(descriptor, 1)) not in (b"", b"\n"):
        text += byte
    return text


def _compile(
    needs: KernelNeeds, report: CompilationReport, begun: float, deadline: float, folder: Path
) -> None:
    from penstock.kernels.gpu.recorded_launches import allow_linking
    from penstock.services.worker.gpu.needed_kernels import recorder_for

    recorder, report.summary = recorder_for(needs)
    allow_linking(folder)
    report.listed_seconds = round(time.monotonic() - begun, 2)
    kernels = sorted(recorder.recorded, key=lambda one: one.cost, reverse=True)
    with _alone(kernel_cache(needs).lock, deadline):
        outcomes = _share(recorder, kernels, min(report.processes, len(kernels)), deadline)
    report.found = sum(one.found for one in outcomes)
    report.failures += [f"{one.name}: {one.failure}" for one in outcomes if one.failure]
    report.compiled = len(outcomes) - report.found - len(report.failures)
    if len(outcomes) < len(kernels):
        report.failures.append(f"{len(kernels) - len(outcomes)} kernels were left undone")
    slow = sorted(outcomes, key=lambda one: one.seconds, reverse=True)
    report.slowest = [(one.name, round(one.seconds, 2)) for one in slow[:8]]


@contextlib.contextmanager
def _alone(lock: Path, deadline: float) -> Iterator[None]:
    """Wait for others that compile the same kernels, as for a further engine of a server: what they
    leave is found."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError:  # nothing can be left there for others either
        yield
        return
    with file:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                _end_with_input(_LOOK_SECONDS)
        yield


def _end_with_input(seconds: float) -> None:
    """Wait so long for the end of standard input, which is this process's end, too."""
    if select.select([0], [], [], seconds)[0] and not os.read(0, 1):
        raise SystemExit(1)


def _share(
    recorder: Recorder, kernels: list[Recorded], processes: int, deadline: float
) -> list[_Outcome]:
    """Compile in so many processes, each of which takes the next kernel that nobody has taken."""
    numbers, numbers_end = os.pipe()
    os.write(numbers_end, b"".join(n.to_bytes(_ENTRY, "big") for n in range(len(kernels))))
    os.close(numbers_end)
    outcomes, outcomes_end = os.pipe()
    gc.collect()
    gc.freeze()
    lead = os.getpid()
    children: list[int] = []
    for _ in range(processes):
        child = os.fork()
        if not child:
            os.close(outcomes)
            _become_compiler(recorder, kernels, numbers, outcomes_end, lead, not children)
        children.append(child)
    os.close(outcomes_end)
    os.close(numbers)
    try:
        text = _read_all(outcomes, deadline)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    lines = [line for line in text.split(b"\n") if line]
    return [msgspec.json.decode(line, type=_Outcome) for line in lines]


def _read_all(descriptor: int, deadline: float) -> bytes:
    """Until all who write there have ended, standard input has, or the time is over."""
    text = b""
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([descriptor, 0], [], [], left)
        if 0 in ready:
            _end_with_input(0.0)
        if descriptor in ready:
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                break
            text += piece
    return text


def _become_compiler(
    recorder: Recorder,
    kernels: list[Recorded],
    numbers: int,
    outcomes: int,
    lead: int,
    first: bool,
) -> None:
    """The life of a forked process; it does not return. first: it does what is done once, too."""
    from penstock.kernels.gpu.recorded_launches import make_driver_module

    try:
        end_with_parent(lead)
        if first:
            make_driver_module()
        while number := os.read(numbers, _ENTRY):
            one = kernels[int.from_bytes(number, "big")]
            outcome = _Outcome(one.name, False, 0.0)
            try:
                outcome.found, outcome.seconds = recorder.compile(one)
            except Exception as failure:
                outcome.failure = f"{type(failure).__name__}: {' '.join(str(failure).split())}"
                outcome.failure = outcome.failure[: _LINE // 8]
            os.write(outcomes, msgspec.json.encode(outcome) + b"\n")
    finally:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
