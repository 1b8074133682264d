"""A picture of how much faster a model is on several GPUs.

    python -m penstock.loadtest.studies.scaling_picture --title "W1 over one GPU" \\
        "B, tensor parallel:1=8425,2=12921,4=18904" "B, data parallel:1=8425,4=31331" > PICTURE.svg

Each line is NAME:GPUS=RATE,… and shows rates over its first; a dashed one shows as many times as
GPUs. Both axes are logarithmic. Exit codes: 0, 2 a line that cannot be read.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from html import escape
from typing import NamedTuple, get_args

from penstock.loadtest.studies.placement_picture import (
    LEFT,
    PANEL,
    STYLE,
    TOP,
    WIDTH,
    Kind,
    Panel,
    text,
)

HEIGHT = TOP + PANEL + 60
_KINDS: tuple[Kind, ...] = get_args(Kind)[1:] + get_args(Kind)[:1]


class Line(NamedTuple):
    """One model in one kind of layout."""

    name: str
    rates: Sequence[tuple[int, float]]
    """Numbers of GPUs, from the fewest, and the rate on so many."""


def line(given: str) -> Line:
    """Raises ``ValueError`` for anything but NAME:GPUS=RATE,…"""
    name, _, points = given.rpartition(":")
    rates = [
        (int(gpus), float(rate)) for gpus, _, rate in (p.partition("=") for p in points.split(","))
    ]
    if not name or min(min(pair) for pair in rates) <= 0 or rates != sorted(rates):
        raise ValueError(given)
    return Line(name, rates)


def draw(title: str, lines: Sequence[Line]) -> str:
    """An SVG document."""
    most = max(gpus for each in lines for gpus, _ in each.rates)
    panel = Panel(TOP, (0.0, math.log2(most)), (0.0, math.log2(most)))
    powers = [float(power) for power in range(int(math.log2(most)) + 1)]
    parts = panel.axes(title, "GPUs", powers, [], lambda power: f"{2**power:g} ×")
    parts += [
        text(panel.x(power), panel.bottom + 18, f"{2**power:g}", "middle") for power in powers
    ]
    right = panel.x(math.log2(most))
    parts.append(
        f'<line class="limit" x1="{LEFT}" y1="{panel.bottom}" x2="{right:.1f}" y2="{panel.top}"/>'
    )
    for number, each in enumerate(lines):
        kind = _KINDS[number % len(_KINDS)]
        first_gpus, first = each.rates[0]
        places = [
            (panel.x(math.log2(gpus)), panel.y(math.log2(first_gpus * rate / first)))
            for gpus, rate in each.rates
        ]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="{kind}" points="{points}"/>')
        parts += [f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in places]
        across, down = LEFT + 16 + 400 * (number % 2), TOP + 20 + 18 * (number // 2)
        parts.append(f'<circle class="{kind}" cx="{across}" cy="{down - 4}" r="5"/>')
        parts.append(text(across + 12, down, each.name))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
    back = f'<rect class="back" width="{WIDTH}" height="{HEIGHT}"/>'
    return "\n".join(
        [
            head + f'aria-label="{escape(title)}">',
            f"<style>{STYLE}</style>",
            back,
            *parts,
            "</svg>\n",
        ]
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--title", required=True)
    parser.add_argument("lines", nargs="+", type=line, metavar="NAME:GPUS=RATE,…")
    options = parser.parse_args(arguments)
    sys.stdout.write(draw(options.title, options.lines))


if __name__ == "__main__":
    main(sys.argv[1:])
