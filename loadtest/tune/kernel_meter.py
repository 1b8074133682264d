"""Measures what ``kernel_trials`` finds, and says which choice is faster than the standing one.

A choice is kept only if each of its repetitions took less time than each of the standing one's,
and their medians differ by ``LEAST_GAIN``. One whose numbers differ, or that cannot be compiled
here, is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from statistics import median

import torch

from penstock.kernels.gpu.side_by_side import side_by_side
from penstock.kernels.kernel_table import Choice, trying, use_choices
from penstock.loadtest.kernel_benches.kernel_timer import KernelTimer
from penstock.loadtest.tune.kernel_trials import (
    Trial,
    best_rows,
    cut_trials,
    products_trials,
)
from penstock.loadtest.tune.step_points import KernelsMeasured, MeasuredChoice
from penstock.services.worker.gpu.decoder import GpuDecoder

LEAST_GAIN = 0.03
"""Of the standing time."""
MOST_ERROR = 2e-2
"""Of what a call writes, beside what the standing choice does."""
REPETITIONS = 7
Timer = Callable[[Callable[[], object]], list[float]]
"""Seconds of each repetition of a call."""
Clock = Callable[[], float]


def is_faster(times: Sequence[float], standing: Sequence[float]) -> bool:
    """By more than what the repetitions of one call differ by."""
    gain = 1.0 - median(times) / median(standing)
    return gain >= LEAST_GAIN and max(times) < min(standing)


class KernelMeter:
    """Of one decoder, whose weights and memory nobody else uses meanwhile."""

    def __init__(
        self,
        decoder: GpuDecoder,
        timer: Timer,
        seconds: float,
        clock: Clock = time.monotonic,
    ) -> None:
        self._decoder, self._timer, self._clock = decoder, timer, clock
        self._ends = clock() + seconds
        self._kept: list[Choice] = []
        self._trials = self._left = 0

    def run(self) -> Iterator[MeasuredChoice | KernelsMeasured]:
        """Each as soon as it is measured; the kept ones are in use from then on."""
        if self._is_time():
            yield from self._rows()
        for trial in cut_trials(self._decoder):
            if trial.others and self._is_time():
                yield from self._cut(trial)
        yield KernelsMeasured(self._trials, self._left)

    def _is_time(self) -> bool:
        there = self._clock() < self._ends
        self._trials, self._left = self._trials + there, self._left + (not there)
        return there

    def _cut(self, trial: Trial) -> Iterator[MeasuredChoice]:
        if self._decoder.space.residual.is_cuda:
            side_by_side(partial(_compile, trial), [trial.standing, *trial.others])
        with trying(trial.standing):
            wanted, standing = trial.out(), self._timer(trial.call)
        best, least = trial.standing, standing
        for choice in trial.others:
            times = self._times(trial, choice, wanted)
            if times is not None and median(times) < median(least):
                best, least = choice, times
        if best is not trial.standing:  # once more, one behind the other
            with trying(trial.standing):
                standing = standing + self._timer(trial.call)
            with trying(best):
                least = least + self._timer(trial.call)
        if is_faster(least, standing):
            self._keep(best)
            yield _measured(best, trial.name, least, standing)

    def _keep(self, choice: Choice) -> None:
        self._kept.append(choice)
        use_choices(self._kept)

    def _times(self, trial: Trial, choice: Choice, wanted: torch.Tensor) -> list[float] | None:
        try:
            with trying(choice):
                error = (trial.out() - wanted).norm() / wanted.norm()
                return self._timer(trial.call) if float(error) < MOST_ERROR else None
        except Exception:  # a kernel that this device or Triton cannot compile
            return None

    def _rows(self) -> Iterator[MeasuredChoice]:
        found = products_trials(self._decoder)
        if found is None:
            return
        (table, *sizes), classes = found
        changed: dict[int, tuple[list[float], list[float]]] = {}
        hopper: list[tuple[int, bool]] = []
        for each in classes:
            times = {name: self._timer(call) for name, call in each.calls.items()}
            standing = times.pop(each.usual)
            winner = next((n for n in times if is_faster(times[n], standing)), each.usual)
            if winner != each.usual:
                changed[each.rows] = times[winner], standing
            hopper.append((each.rows, winner == "hopper"))
        first, last = best_rows(hopper)
        told = [
            rows
            for rows, is_hopper in hopper
            if rows in changed and (first <= rows <= last) == is_hopper
        ]
        if not told:
            return
        choice = Choice(table, tuple(sizes), (first, last))
        self._keep(choice)
        layers = len(self._decoder.weights.layers)
        rows = max(told, key=lambda one: median(changed[one][1]) / median(changed[one][0]))
        yield _measured(choice, f"{layers} layers without attention, {rows} rows", *changed[rows])


def _compile(trial: Trial, choice: Choice) -> None:
    with suppress(Exception), trying(choice):  # whoever times it finds out
        trial.once()


def _measured(
    choice: Choice, what: str, times: Sequence[float], standing: Sequence[float]
) -> MeasuredChoice:
    return MeasuredChoice(
        str(choice), what, round(1e6 * median(times), 1), round(1e6 * median(standing), 1)
    )


def measure_kernels(executor: object, seconds: float) -> Iterator[MeasuredChoice | KernelsMeasured]:
    """Of an executor on a GPU, which computes nothing meanwhile and is of no use behind it."""
    decoder = getattr(executor, "decoder", None)
    if type(decoder) is not GpuDecoder:
        yield KernelsMeasured(0, 0, "its layers have no kernels to choose between")
        return
    try:
        with torch.inference_mode():
            timer = KernelTimer(decoder.space.residual.device, repetitions=REPETITIONS, warm_up=1)

            def times(call: Callable[[], object]) -> list[float]:
                found = timer.times(call)
                return [found.least, found.median, found.most]

            yield from KernelMeter(decoder, times, seconds).run()
    except Exception as failure:  # what was found before holds
        yield KernelsMeasured(0, 0, f"{type(failure).__name__}: {failure}")
