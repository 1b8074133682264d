"""What is to be kept: limits of times, and by how many of the requests."""

from __future__ import annotations

import argparse

import msgspec

from penstock.loadtest.options import goodput_limits

SHARE = 0.9
"""Of the requests must keep all limits; the figures that are told are those of this percentile."""
NAMES = ("ttft", "tpot")


class Workload(msgspec.Struct, frozen=True):
    """Requests, in tokens; a request has up to ``RANGE`` more or less of both."""

    prompt: int
    answer: int

    def __str__(self) -> str:
        return f"prompts of about {self.prompt} tokens, answers of about {self.answer}"


RANGE = 0.3


class Objective(msgspec.Struct, frozen=True):
    """Limits in milliseconds; ``None``: there is none."""

    ttft: float | None = None
    tpot: float | None = None

    @property
    def limits(self) -> dict[str, float]:
        found = {"ttft": self.ttft, "tpot": self.tpot}
        return {name: limit for name, limit in found.items() if limit is not None}

    @property
    def flags(self) -> list[str]:
        """As ``bench serve --goodput`` takes them, and the flag itself with commas between."""
        return [f"{name}:{limit:g}" for name, limit in self.limits.items()]

    def __str__(self) -> str:
        return " and ".join(f"{name.upper()} {limit:g} ms" for name, limit in self.limits.items())


def read_objective(text: str) -> Objective:
    """From ``ttft:200,tpot:20``. Raises ``argparse.ArgumentTypeError``."""
    try:
        limits = goodput_limits([part.strip() for part in text.split(",")])
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--goodput ")) from None
    for name, limit in limits.items():
        if name not in NAMES:
            raise argparse.ArgumentTypeError(f"{name}: only {' and '.join(NAMES)} can be tuned for")
        if limit <= 0:
            raise argparse.ArgumentTypeError(f"{name}:{limit:g}: the limit must be more than 0 ms")
    return Objective(**limits)


def shown_ms(value: float) -> str:
    """``1.76 ms``, ``17.1 ms``, ``1,760 ms``."""
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


class Impossible(Exception):
    """The objective cannot be kept here. The message says the best that was found."""


def refuse(objective: Objective, best: str) -> Impossible:
    """best: what was measured, in words."""
    return Impossible(
        f"--objective {','.join(objective.flags)} cannot be kept here: the best that was found is "
        f"{best}; allow more, or take a smaller or quantized model, shorter prompts (--input-len) "
        "or a faster device"
    )
