"""Which layers each stage of a pipeline has, by what each of them costs.

A pipeline is as fast as its slowest stage, and holds as much as its fullest one. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import add
from typing import NamedTuple

INFINITE = float("inf")


class StageRoom(NamedTuple):
    """What the layers take of a device's memory, in bytes."""

    layers: Sequence[int]
    """Of each layer: weights, and keys and values."""
    first: int
    """What the first stage has besides: the embedding; …"""
    last: int
    """… and the last one: the LM head."""
    device: int
    """What a stage may have of its device for all of these."""


def even(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage; the first stages have one more where they do not divide."""
    each, more = divmod(layers, stages)
    return tuple(each + (stage < more) for stage in range(stages))


def stage_sums(
    costs: Sequence[float], counts: Sequence[int], last: float = 0, *, first: float = 0
) -> list[float]:
    """What each stage costs. counts: layers of each; the others: see ``divided``."""
    ends = list(accumulate(counts))
    found = [sum(costs[end - count : end]) for end, count in zip(ends, counts, strict=True)]
    found[0] += first
    found[-1] += last
    return found


def divided(
    costs: Sequence[float],
    stages: int,
    last: float = 0,
    room: StageRoom | None = None,
    *,
    first: float = 0,
) -> tuple[int, ...]:
    """How many neighbouring layers each of ``stages`` has, at least one, so that the dearest stage
    costs the least; of equal divisions the most even one, with more layers in the first stages.

    costs: of each layer; last, first: what the last stage computes besides (the LM head), and the
    first one (the embedding), in the same unit; room: divisions that do not fit in it are left out.
    Dynamic programming over (stages, layers), O(stages × layers²). Raises ``ValueError`` where
    there are fewer layers than stages, and where no division fits.
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise ValueError(f"{count} layers cannot be divided among {stages} stages: 1 to {count}")
    sums = [0, *accumulate(costs)]
    held = [0, *accumulate(room.layers)] if room is not None else []

    def cost(stage: int, begin: int, end: int) -> float:
        is_last = stage == stages - 1
        if room is not None:
            beside = room.first * (stage == 0) + room.last * is_last
            if held[end] - held[begin] + beside > room.device:
                return INFINITE
        return sums[end] - sums[begin] + first * (stage == 0) + last * is_last

    def square(stage: int, begin: int, end: int) -> float:
        found = cost(stage, begin, end)
        return found * found if found <= dearest else INFINITE

    dearest, _ = _least(count, stages, cost, max)
    if room is not None and dearest == INFINITE:
        raise ValueError(f"{count} layers do not fit on {stages} stages of {room.device} bytes")
    _, ends = _least(count, stages, square, add)
    return tuple(end - begin for begin, end in zip([0, *ends], ends, strict=False))


def _least(
    count: int,
    stages: int,
    cost: Callable[[int, int, int], float],
    together: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """The least that all stages cost together, and where each of them ends then. cost: of a stage,
    by its number, the layer that it begins with and the one behind it."""
    found = [INFINITE, *(cost(0, 0, end) for end in range(1, count + 1))]
    """Of the stages so far, by where they end."""
    begins: list[list[int]] = []
    for stage in range(1, stages):
        ahead, found, chosen = found, [INFINITE] * (count + 1), [0] * (count + 1)
        for end in range(stage + 1, count + 1):
            # From behind: the latest beginning leaves the most layers to the stages ahead.
            for begin in range(end - 1, stage - 1, -1):
                total = together(ahead[begin], cost(stage, begin, end))
                if total < found[end]:
                    found[end], chosen[end] = total, begin
        begins.append(chosen)
    ends = [count]
    for chosen in reversed(begins):
        ends.append(chosen[ends[-1]])
    return found[count], ends[::-1]
