"""The loss curve as a picture: ``python -m penstock.demo.training.plot log.jsonl loss.svg``."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 360, 64, 44, 16, 16
_TEXT = 'font-family="sans-serif" font-size="12" fill="#555"'


def _ticks(top: float) -> list[float]:
    """About five round numbers from 0 to ``top``."""
    step = 10 ** math.floor(math.log10(top / 5))
    step *= next(each for each in (1, 2, 5, 10) if top / (step * each) <= 6)
    return [step * number for number in range(int(top / step) + 1)]


def svg(points: Sequence[tuple[float, float]]) -> str:
    """``points``: million tokens, loss. The loss has a logarithmic axis."""
    most = max(x for x, _ in points)
    low = math.floor(math.log10(min(y for _, y in points)))
    high = math.ceil(math.log10(max(y for _, y in points)))

    def across(x: float) -> float:
        return LEFT + x / most * (WIDTH - LEFT - RIGHT)

    def down(y: float) -> float:
        share = (math.log10(y) - low) / (high - low)
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
    ]
    for power in range(low, high + 1):
        y = down(10.0**power)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" {_TEXT}>{10.0**power:g}</text>'
        )
    for x in _ticks(most):
        parts.append(
            f'<text x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" {_TEXT}>'
            f"{x:g}</text>"
        )
    line = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in points)
    parts += [
        f'<polyline points="{line}" fill="none" stroke="#1f6feb" stroke-width="1.5"/>',
        f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle" {_TEXT}>'
        "million tokens</text>",
        f'<text x="14" y="{HEIGHT / 2:.0f}" text-anchor="middle" {_TEXT} '
        f'transform="rotate(-90 14 {HEIGHT / 2:.0f})">loss (nats a token)</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Two file names. Returns the exit code."""
    if len(arguments) != 2:
        print("usage: python -m penstock.demo.training.plot LOG SVG", file=sys.stderr)
        return 2
    lines = map(json.loads, Path(arguments[0]).read_text(encoding="utf-8").splitlines())
    points = [(line["tokens"] / 1e6, line["loss"]) for line in lines]
    Path(arguments[1]).write_text(svg(points), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
