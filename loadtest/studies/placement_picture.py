"""The picture of a simulated placement: hit rates over the time, and the share of each engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Literal, NamedTuple

Kind = Literal["reference", "first", "second", "other"]
WIDTH, HEIGHT = 860, 560
LEFT, RIGHT, GAP = 64, 20, 70
PANEL = 190
TOP = 56
STYLE = """
text { font: 13px sans-serif; fill: #444 } .title { font-weight: bold; fill: #222 }
.axis { stroke: #999; fill: none } .grid { stroke: #ddd }
.limit { stroke: #b00; stroke-dasharray: 4 4 }
.reference { stroke: #888; fill: #888 } .first { stroke: #1663be; fill: #1663be }
.second { stroke: #d9730d; fill: #d9730d } .other { stroke: #8a4fbf; fill: #8a4fbf }
polyline { fill: none !important; stroke-width: 2 } circle { stroke: none !important }
.back { fill: #fff }
"""


class Line(NamedTuple):
    """One simulation."""

    name: str
    kind: Kind
    hit_rates: Sequence[tuple[float, float]]
    """By time in seconds."""
    shares: Sequence[float]
    """Requests of each engine over its share, sorted."""
    losses: Sequence[float]
    """Times."""


class Panel:
    """A rectangle with axes. Values grow to the right and upwards."""

    def __init__(self, top: int, across: tuple[float, float], up: tuple[float, float]) -> None:
        self.top, self.bottom = top, top + PANEL
        self._across, self._up = across, up

    def x(self, value: float) -> float:
        low, high = self._across
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / (high - low)

    def y(self, value: float) -> float:
        low, high = self._up
        return self.bottom - PANEL * (min(max(value, low), high) - low) / (high - low)

    def axes(
        self,
        title: str,
        below: str,
        ups: Sequence[float],
        acrosses: Sequence[float],
        shown: Callable[[float], str],
    ) -> list[str]:
        """Title, axes, lines across at ``ups`` and numbers below at ``acrosses``."""
        right = WIDTH - RIGHT
        found = [f'<text class="title" x="{LEFT}" y="{self.top - 12}">{escape(title)}</text>']
        for value in ups:
            y = self.y(value)
            found.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            found.append(text(LEFT - 8, y + 4, shown(value), "end"))
        for value in acrosses:
            found.append(text(self.x(value), self.bottom + 18, f"{value:g}", "middle"))
        found.append(text((LEFT + right) / 2, self.bottom + 36, below, "middle"))
        path = f"M{LEFT} {self.top}V{self.bottom}H{right}"
        return [*found, f'<path class="axis" d="{path}"/>']


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    """Words at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def draw(lines: Sequence[Line]) -> str:
    """An SVG document of two panels."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="Hit rates over the time, and the part of the requests of each engine">',
        f"<style>{STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{HEIGHT}"/>',
        *_legend(lines),
        *_hit_rates(lines),
        *_shares([line for line in lines if len(line.shares) > 1]),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _legend(lines: Sequence[Line]) -> list[str]:
    found, x = [], float(LEFT)
    for line in lines:
        found.append(f'<circle class="{line.kind}" cx="{x + 5:.0f}" cy="16" r="5"/>')
        found.append(text(x + 16, 20, line.name))
        x += 36 + 6.6 * len(line.name)
    return found


def _hit_rates(lines: Sequence[Line]) -> list[str]:
    end = max(at for line in lines for at, _ in line.hit_rates) or 1.0
    panel = Panel(TOP, (0.0, end), (0.0, 1.0))
    ticks = [end * part / 4 for part in range(5)]
    found = panel.axes(
        "Share of prompt tokens that were found in a cache", "seconds; marks are lost engines",
        [0.0, 0.25, 0.5, 0.75, 1.0], ticks, lambda value: f"{100 * value:.0f} %",
    )  # fmt: skip
    for line in lines:
        points = " ".join(f"{panel.x(at):.1f},{panel.y(rate):.1f}" for at, rate in line.hit_rates)
        found.append(f'<polyline class="{line.kind}" points="{points}"/>')
        for at in line.losses:
            x = panel.x(min(at, end))
            found.append(
                f'<line class="{line.kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{panel.bottom - 10}" '
                f'y2="{panel.bottom}"/>'
            )
    return found


def _shares(lines: Sequence[Line]) -> list[str]:
    most = max(len(line.shares) for line in lines)
    top = max(1.3, *(line.shares[-1] for line in lines))
    low = min(0.7, *(line.shares[0] for line in lines))
    panel = Panel(TOP + PANEL + GAP + 10, (0.0, most), (low, top))
    found = panel.axes(
        "Requests of each engine, in multiples of its share",
        "engines, from the fewest requests to the most",
        [0.8, 1.0, 1.2], [], lambda value: f"{value:.1f}",
    )  # fmt: skip
    y = panel.y(1.2)
    found.append(
        f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    )
    for line in lines:
        step = most / len(line.shares)
        found += [
            f'<circle class="{line.kind}" cx="{panel.x((rank + 0.5) * step):.1f}" '
            f'cy="{panel.y(share):.1f}" r="2.5"/>'
            for rank, share in enumerate(line.shares)
        ]
    return found
