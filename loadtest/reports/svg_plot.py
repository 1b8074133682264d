"""Line plots as inline SVG, coloured by the page's style sheet, so that they follow its light or
dark scheme and need nothing from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import msgspec

WIDTH, HEIGHT = 440.0, 240.0
"""In pixels about as wide as the page shows it, so that letters keep their size."""
LEFT, RIGHT, TOP, BOTTOM = 58.0, 16.0, 14.0, 44.0
MOST_TICKS = 6
CHARACTER, LINE = 7.0, 12.0
"""Room that a name needs beside its point."""
COLOURS = 8
"""Classes ``c0`` … of the style sheet; marks have a shape for each as well."""
_DOT = "m-1.5 0a1.5 1.5 0 1 0 3 0a1.5 1.5 0 1 0 -3 0"
"""What is drawn of a point that stands alone."""
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


class Line(msgspec.Struct):
    """One line of a plot. A point with ``None`` interrupts it."""

    label: str
    points: Sequence[tuple[float, float | None]]
    colour: int = 0
    dashed: bool = False
    marks: bool = False
    names: Sequence[str] = ()
    """What each point is, shown where the pointer rests on it, and beside it where room is."""


def ticks(low: float, high: float) -> list[float]:
    """A few round numbers from at most ``low`` to at least ``high``."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / (MOST_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in _STEPS if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def shown(value: float) -> str:
    """With about three digits."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{min(6, digits)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


class _Scale:
    """From a value to its place along an axis."""

    def __init__(self, values: Sequence[float], begin: float, end: float) -> None:
        self.ticks = ticks(min(0.0, *values), max(values)) if values else [0.0, 1.0]
        self._low, self._high = self.ticks[0], self.ticks[-1]
        self._begin, self._end = begin, end

    def __call__(self, value: float) -> float:
        share = (value - self._low) / (self._high - self._low)
        return self._begin + share * (self._end - self._begin)


def plot(lines: Sequence[Line], *, title: str, x_label: str, y_label: str) -> str:
    """The figure with its legend. Both axes begin at 0."""
    points = [(x, y) for line in lines for x, y in line.points if y is not None]
    across = _Scale([x for x, _ in points], LEFT, WIDTH - RIGHT)
    up = _Scale([y for _, y in points], HEIGHT - BOTTOM, TOP)
    taken: list[tuple[float, float]] = []
    parts = [
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(title)}">',
        *_axes(across, up, x_label, y_label),
        *(part for line in lines for part in _line(line, across, up, taken)),
        "</svg>",
    ]
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>{''.join(parts)}{_legend(lines)}</figure>"
    )


def _axes(across: _Scale, up: _Scale, x_label: str, y_label: str) -> list[str]:
    floor, middle = HEIGHT - BOTTOM, (TOP + HEIGHT - BOTTOM) / 2
    parts = []
    for tick in up.ticks:
        y = up(tick)
        parts.append(
            f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{LEFT - 6:g}" y="{y + 4:.1f}" text-anchor="end">'
            f"{shown(tick)}</text>"
        )
    for tick in across.ticks:
        x = across(tick)
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP:g}" y2="{floor:g}"/>'
            f'<text class="tick" x="{x:.1f}" y="{floor + 16:g}" text-anchor="middle">'
            f"{shown(tick)}</text>"
        )
    parts.append(
        f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2:g}" y="{HEIGHT - 8:g}" '
        f'text-anchor="middle">{escape(x_label)}</text>'
        f'<text class="axis" transform="rotate(-90 14 {middle:g})" x="14" y="{middle:g}" '
        f'text-anchor="middle">{escape(y_label)}</text>'
    )
    return parts


def _line(line: Line, across: _Scale, up: _Scale, taken: list[tuple[float, float]]) -> list[str]:
    """taken: where names stand."""
    colour = f"c{line.colour % COLOURS}"
    pieces: list[list[str]] = [[]]
    for x, y in line.points:
        if y is None:
            pieces.append([])
        else:
            pieces[-1].append(f"{across(x):.1f} {up(y):.1f}")
    path = [f"M{' L'.join(piece)}{_DOT * (len(piece) == 1)}" for piece in pieces if piece]
    dashed = " dashed" if line.dashed else ""
    parts = [f'<path class="line {colour}{dashed}" d="{" ".join(path)}"/>'] if path else []
    if not line.marks:
        return parts
    for number, (x, y) in enumerate(line.points):
        if y is None:
            continue
        name = line.names[number] if number < len(line.names) else ""
        told = f"{line.label} {name}: {shown(x)}, {shown(y)}"
        mark = _mark(line.colour, across(x), up(y))
        parts.append(f'<path class="mark {colour}" d="{mark}"><title>{escape(told)}</title></path>')
        width = CHARACTER * len(name)
        left, low = min(across(x) + 6, WIDTH - width), up(y) - 6
        if (
            name
            and not line.dashed
            and not any(
                abs(left - other) < width and abs(low - beside) < LINE for other, beside in taken
            )
        ):
            taken.append((left, low))
            parts.append(f'<text class="name" x="{left:.1f}" y="{low:.1f}">{escape(name)}</text>')
    return parts


def _mark(colour: int, x: float, y: float) -> str:
    """A circle, square, diamond or triangle, so that colour is not all that tells lines apart."""
    shapes = (
        f"M{x - 4:.1f} {y:.1f}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
        f"M{x - 3.5:.1f} {y - 3.5:.1f}h7v7h-7z",
        f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z",
        f"M{x:.1f} {y - 5:.1f}l4.5 8h-9z",
    )
    return shapes[colour % len(shapes)]


def _legend(lines: Sequence[Line]) -> str:
    if len(lines) < 2:
        return ""
    entries = []
    for line in lines:
        colour, dashed = f"c{line.colour % COLOURS}", " dashed" if line.dashed else ""
        mark = f'<path class="mark {colour}" d="{_mark(line.colour, 12, 6)}"/>' * line.marks
        entries.append(
            f'<span><svg class="key" viewBox="0 0 24 12"><path class="line {colour}{dashed}" '
            f'd="M1 6H23"/>{mark}</svg>{escape(line.label)}</span>'
        )
    return f'<div class="legend">{"".join(entries)}</div>'
