"""Times steps of an executor, in a process of its own that gives the device back when it ends.

    python -m penstock.loadtest.tune.measured_steps --config FILE --rows 1 2 4 --chunks 256 512 …

A line of JSON on standard output says what the executor is, and one more for each step as soon as
it is measured: whoever reads them may end this process at any time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

import msgspec

from penstock.loadtest.offline.offline_engine import Engine, engine_of
from penstock.loadtest.offline.step_timer import StepTimer, prompts_of
from penstock.loadtest.tune.step_points import KernelsMeasured, MeasuredChoice, StepPoint
from penstock.protocol.config import Config, ConfigError
from penstock.protocol.config.flags import build_parser
from penstock.services.library.server_process import GROUPS
from penstock.services.worker.cuda_driver import read_device
from penstock.services.worker.executor import Executor
from penstock.services.worker.loading import load_executor

WARM_UP, MOST_STEPS, LEAST_STEPS = 3, 60, 3
POINT_SECONDS = 0.5
"""For one point, unless ``LEAST_STEPS`` take longer."""
DECODE_SHARE = 0.6
"""Of the time, after which no more rows are tried: chunks need the rest."""


class Started(msgspec.Struct, frozen=True):
    """The first line."""

    executor: str
    context: int
    device: str = ""
    """Name of the GPU."""


def main(arguments: Sequence[str]) -> int:
    parsed = _parser().parse_args(arguments)
    engine = engine_of(parsed)
    executor = load_executor(_with_room(engine, parsed), lambda text: None)
    context = min(parsed.context, executor.capacity.max_model_len - WARM_UP - LEAST_STEPS - 1)
    device = read_device() if engine.config.device.device == "cuda" else None
    _tell(Started(executor.summary or executor.device, context, device.name if device else ""))
    for point in _points(executor, parsed, context):
        _tell(point)
    if parsed.kernels_s and device is not None:
        from penstock.loadtest.tune.kernel_meter import measure_kernels

        for found in measure_kernels(executor, parsed.kernels_s):
            _tell(found)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = build_parser("penstock tune", "Time steps.", GROUPS, positional_model=True)
    parser.add_argument("--rows", type=int, nargs="+", required=True)
    parser.add_argument("--chunks", type=int, nargs="+", required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--most-ms", type=float, required=True)
    parser.add_argument("--limit-s", type=float, required=True)
    parser.add_argument("--kernels-s", type=float, default=0.0, help="for choices of kernels")
    return parser


def _tell(line: Started | StepPoint | MeasuredChoice | KernelsMeasured) -> None:
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


def _with_room(engine: Engine, parsed: argparse.Namespace) -> Config:
    """The configuration, with slots for the most rows and the prompts beside them."""
    rows, chunk = max(parsed.rows), max(parsed.chunks)
    scheduler = msgspec.structs.replace(
        engine.config.scheduler,
        max_num_seqs=rows + len(prompts_of(chunk)),
        max_num_batched_tokens=rows + max(chunk, len(prompts_of(chunk))),
    )
    model = msgspec.structs.replace(engine.config.model, model=str(engine.info.folder))
    return msgspec.structs.replace(engine.config, model=model, scheduler=scheduler)


def _points(executor: Executor, parsed: argparse.Namespace, context: int) -> Iterator[StepPoint]:
    """Rows until a step takes longer than is of use, then chunks beside half of the rows that do
    not."""
    ends = time.monotonic() + parsed.limit_s
    beside = [1]
    for rows in parsed.rows:
        point = _timed(executor, rows, context, 0)
        yield point
        if point.ms is None or point.ms > parsed.most_ms:
            break
        beside.append(rows)
        if time.monotonic() > ends - (1.0 - DECODE_SHARE) * parsed.limit_s:
            break
    for chunk in parsed.chunks:
        if time.monotonic() > ends:
            return
        point = _timed(executor, beside[len(beside) // 2], context, chunk)
        yield point
        if point.ms is None:
            return


def _timed(executor: Executor, rows: int, context: int, prefill: int) -> StepPoint:
    """The median of steps that follow each other."""
    steps = min(MOST_STEPS, executor.capacity.max_model_len - context - WARM_UP - 1)
    try:
        timer = StepTimer(executor, rows, context, steps + 1, 0.6, 0, prefill, warm_up=WARM_UP)
    except ConfigError as error:
        return StepPoint(rows, prefill, None, str(error))
    first = _step_ms(timer, LEAST_STEPS)
    more = min(steps - LEAST_STEPS, int(1e3 * POINT_SECONDS / max(first, 1e-3)) - LEAST_STEPS)
    ms = _step_ms(timer, more) if more >= LEAST_STEPS else first
    timer.close()
    return StepPoint(rows, prefill, ms)


def _step_ms(timer: StepTimer, steps: int) -> float:
    _, ends = timer.run(steps)
    return 1e3 * median(later - earlier for earlier, later in pairwise(ends))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
