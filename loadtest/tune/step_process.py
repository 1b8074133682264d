"""Runs ``measured_steps`` beside this process, for a bounded time."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.loadtest.tune.estimate import Given
from penstock.loadtest.tune.measured_steps import Started
from penstock.loadtest.tune.objective import Objective, Workload
from penstock.loadtest.tune.step_points import KernelsMeasured, MeasuredChoice, StepPoint, Steps
from penstock.loadtest.tune.time_limit import OutOfTime, TimeLimit
from penstock.loadtest.tune.written import written

ROWS = {"cpu": 128, "null": 256, "cuda": 512}
CHUNKS = {"cpu": (128, 2048), "null": (256, 8192), "cuda": (512, 16_384)}
"""The most rows, and the fewest and the most tokens of prompts that are tried."""
WHOLE_SHARE, MEASURE_SHARE = 0.45, 0.25
"""Of all time: for the process, and for what it measures once the model is loaded."""
KERNEL_SHARE = 0.2
"""Beside them, for choices of kernels."""
Line = StepPoint | MeasuredChoice | KernelsMeasured


class StepsFailed(RuntimeError):
    """The executor could not be loaded or has ended. Carries what it said last."""


class Candidates(msgspec.Struct, frozen=True):
    rows: list[int]
    chunks: list[int]

    @property
    def flags(self) -> list[str]:
        return ["--rows", *map(str, self.rows), "--chunks", *map(str, self.chunks)]


def candidates(device: str, given: Given) -> Candidates:
    """Powers of two; a setting that was given is the only one or the last."""
    least, most = CHUNKS[device]
    rows, chunks = _doubled(1, ROWS[device]), _doubled(least, most)
    if "max_num_seqs" in given.fixed:
        rows = [*_doubled(1, given.max_num_seqs - 1), given.max_num_seqs]
    if "max_num_batched_tokens" in given.fixed:
        chunks = [given.max_num_batched_tokens]
    elif given.max_num_batched_tokens not in chunks:
        chunks = sorted([*chunks, given.max_num_batched_tokens])
    return Candidates(rows, chunks)


def _doubled(first: int, most: int) -> list[int]:
    found = []
    while first <= most:
        found.append(first)
        first *= 2
    return found


def measure_steps(
    standing: Mapping[str, Any],
    device: str,
    given: Given,
    objective: Objective,
    workload: Workload,
    limit: TimeLimit,
    folder: Path,
    *,
    kernels: bool = False,
) -> Steps:
    """Steps of the device. standing: settings by name; kernels: whether to measure choices of
    kernels, too, where there are any.

    Where there is no room for the largest ones, those are left out. Raises ``StepsFailed`` and
    ``OutOfTime``.
    """
    path = folder / "steps.toml"
    path.write_text(written(standing))
    path.chmod(0o600)
    wanted = candidates(device, given)
    smaller = Candidates(
        [one for one in wanted.rows if one <= given.max_num_seqs],
        [one for one in wanted.chunks if one <= given.max_num_batched_tokens],
    )
    context = workload.prompt + workload.answer // 2
    flags = ["--config", str(path), "--context", str(context)]
    flags += ["--most-ms", f"{objective.tpot or 1e9:g}"]
    flags += ["--limit-s", f"{MEASURE_SHARE * limit.seconds:g}"]
    seconds = WHOLE_SHARE * limit.seconds
    if kernels:
        flags += ["--kernels-s", f"{KERNEL_SHARE * limit.seconds:g}"]
        seconds += KERNEL_SHARE * limit.seconds
    limit.now("steps: loading the model")
    try:
        return _run([*flags, *wanted.flags], seconds, limit)
    except StepsFailed:
        if wanted == smaller:
            raise
    limit.now("steps: loading the model with fewer rows and tokens")
    return _run([*flags, *smaller.flags], seconds, limit)


def _run(flags: Sequence[str], seconds: float, limit: TimeLimit) -> Steps:
    command = [sys.executable, "-m", "penstock.loadtest.tune.measured_steps", *flags]
    late = threading.Event()
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=said, text=True, errors="replace"
        )

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(min(seconds, limit.left), end)
        timer.start()
        try:
            started, lines = _read(process.stdout, limit.now)
            process.wait()
        finally:
            timer.cancel()
            process.kill()
            process.wait()
        said.seek(0)
        last = (said.read().strip().splitlines() or ["it said nothing"])[-1]
    points = [line for line in lines if isinstance(line, StepPoint)]
    if started is not None and any(point.ms is not None for point in points):
        kernels = [line for line in lines if isinstance(line, MeasuredChoice)]
        ended = next((line for line in lines if isinstance(line, KernelsMeasured)), None)
        return Steps(started.executor, started.context, points, started.device, kernels, ended)
    if late.is_set():
        raise OutOfTime(
            f"--seconds {limit.seconds:g} is too short: no step was measured within {seconds:.0f} "
            "s, in which the model has to be loaded; give more"
        )
    notes = [point.note for point in points if point.note]
    raise StepsFailed(f"steps of the model could not be measured: {(notes or [last])[-1]}")


def _read(
    stream: Iterable[str] | None, now: Callable[[str], None]
) -> tuple[Started | None, list[Line]]:
    """What it tells, up to the end of its output. Lines that libraries print there, and one that
    its end cut, are left out."""
    started: Started | None = None
    found: list[Line] = []
    for line in stream or ():
        try:
            if started is None:
                started = msgspec.json.decode(line, type=Started)
                now("steps: one row")
                continue
            point = _decoded(line)
        except msgspec.DecodeError:
            continue
        found.append(point)
        if not isinstance(point, StepPoint):
            if isinstance(point, MeasuredChoice):
                now(f"kernels: {point}")
            continue
        beside = f", {point.prefill} tokens of prompts" if point.prefill else ""
        took = f"{point.ms:.3g} ms" if point.ms is not None else point.note
        now(f"steps: {point.rows} rows{beside}: {took}")
    return started, found


def _decoded(line: str) -> Line:
    """Raises ``msgspec.DecodeError``."""
    try:
        return msgspec.json.decode(line, type=MeasuredChoice | KernelsMeasured)
    except msgspec.ValidationError:
        return msgspec.json.decode(line, type=StepPoint)
