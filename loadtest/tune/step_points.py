"""Steps of the executor, as they were measured: points, and what lies between them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec


class StepPoint(msgspec.Struct, frozen=True):
    """One step, which is the same again and again."""

    rows: int
    """Sequences that decode."""
    prefill: int
    """Tokens of prompts beside them."""
    ms: float | None
    """``None``: it could not be measured."""
    note: str = ""
    """Why."""


class MeasuredChoice(msgspec.Struct, frozen=True, tag=True):
    """A choice between kernels that was faster than the standing one. Microseconds."""

    line: str
    """Of ``kernel_table``."""
    what: str
    """What was timed."""
    us: float
    standing_us: float

    def __str__(self) -> str:
        gain = 1.0 - self.us / self.standing_us
        return (
            f"{self.line}: {self.what} took {self.us:g} µs, {self.standing_us:g} as it stood "
            f"({gain:.0%} less)"
        )


class KernelsMeasured(msgspec.Struct, frozen=True, tag=True):
    """How many choices were measured."""

    trials: int
    left: int
    """For which there was no time."""
    note: str = ""
    """Why not all were."""


class Steps(msgspec.Struct, frozen=True):
    """What was measured of an executor."""

    executor: str
    """What it is, for people."""
    context: int
    """Positions before each row's token."""
    points: list[StepPoint]
    device: str = ""
    """Name of the GPU, if it is one."""
    kernels: list[MeasuredChoice] = []
    """Choices of kernels that were faster than the standing ones."""
    kernels_measured: KernelsMeasured | None = None

    @property
    def decode(self) -> list[tuple[int, float]]:
        """Rows and milliseconds of steps that only decode, by their rows."""
        return sorted((p.rows, p.ms) for p in self.points if p.prefill == 0 and p.ms is not None)

    @property
    def prefill(self) -> list[tuple[int, int, float]]:
        """Tokens of prompts, rows beside them, and milliseconds."""
        return sorted(
            (p.prefill, p.rows, p.ms) for p in self.points if p.prefill and p.ms is not None
        )

    def decode_ms(self, rows: float) -> float:
        """Of a step with so many rows: on the line between its neighbours, and beyond the last one
        as steep as before it."""
        return between(self.decode, rows)

    def token_ms(self, chunk: int) -> float:
        """What a token of a prompt adds to a step that computes so many of them."""
        found = next(one for one in self.prefill if one[0] == chunk)
        return max(0.0, found[2] - self.decode_ms(found[1])) / chunk

    def prompt_ms(self, tokens: int, chunk: int) -> float:
        """A prompt of so many tokens, in steps of ``chunk`` of them beside one row."""
        steps = -(-tokens // chunk)
        return steps * self.decode_ms(1) + tokens * self.token_ms(chunk)


def between(points: Sequence[tuple[int, float]], at: float) -> float:
    """The value at a place of a line through points that are sorted; flat ahead of the first."""
    places = [place for place, _ in points]
    if at <= places[0] or len(points) == 1:
        return points[0][1]
    right = min(bisect_left(places, at), len(points) - 1)
    (left_at, left), (right_at, value) = points[right - 1], points[right]
    return left + (value - left) * (at - left_at) / (right_at - left_at)
