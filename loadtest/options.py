"""Reading the values of flags: each function names the value and the limit when it refuses."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from penstock.loadtest.reports.result_files import ReadRun

LIMITED = ("ttft", "tpot", "itl", "e2el")
METRICS = (*LIMITED, "queue")
Since = Literal["intended", "sent"]
"""From when TTFT and E2EL count: from when a request was to be sent, so that what waited in this
client counts too (coordinated omission), or from when it was."""


def integer(least: int, most: int) -> Callable[[str], int]:
    """A type for argparse: an integer from ``least`` to ``most``."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not between {least} and {most}")
        return value

    return read


def number(
    least: float, most: float, *, above: bool = False, below: bool = False
) -> Callable[[str], float]:
    """A type for argparse: from ``least`` to ``most``; ``above``, ``below``: without the bound."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
        low = value > least if above else value >= least
        high = value < most if below else value <= most
        if not (low and high):
            words = ("above" if above else "at least", "below" if below else "at most")
            raise argparse.ArgumentTypeError(
                f"{text} is not {words[0]} {least:g} and {words[1]} {most:g}"
            )
        return value

    return read


def length_range(text: str) -> tuple[int, int]:
    """``N`` or ``LOW:HIGH``, both in it."""
    low, colon, high = text.partition(":")
    try:
        found = (int(low), int(high if colon else low))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected N or LOW:HIGH, got {text!r}") from None
    if not 1 <= found[0] <= found[1]:
        raise argparse.ArgumentTypeError(f"expected 1 <= LOW <= HIGH, got {text!r}")
    return found


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name.strip(), value.strip()


def header(text: str) -> tuple[str, str]:
    name, value = _pair(text)
    if any(c in text for c in "\r\n") or any(c in " :" for c in name):
        raise argparse.ArgumentTypeError(f"no name of a header: {name!r}")
    return name, value


def metadata(text: str) -> tuple[str, str]:
    name, value = _pair(text)
    if name in ReadRun.__struct_fields__:
        raise argparse.ArgumentTypeError(f"{name} is a field of the result; choose another name")
    return name, value


def extra_body(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object: {error}") from None


def metric_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in METRICS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(METRICS)}")
    return names


def percentile_list(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers as in 50,99, got {text!r}") from None
    for share in found:
        if not 0 <= share <= 100:
            raise argparse.ArgumentTypeError(f"{share:g} is not between 0 and 100")
    return found


def goodput_limits(texts: Sequence[str]) -> dict[str, float]:
    """``["ttft:200", "e2el:5000"]`` in milliseconds. Raises ``ValueError``."""
    found = {}
    for text in texts:
        name, _, limit = text.partition(":")
        if name not in LIMITED:
            raise ValueError(f"--goodput {text}: {name!r} is none of {', '.join(LIMITED)}")
        try:
            found[name] = float(limit)
        except ValueError:
            raise ValueError(f"--goodput {text}: expected {name}:MILLISECONDS") from None
        if not 0 <= found[name] < math.inf:
            raise ValueError(f"--goodput {text}: the limit must be 0 or more")
    return found
