"""Which layers each stage of a pipeline gets, by what each of them was measured to take."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.loadtest.tune.objective import shown_ms
from penstock.services.worker.models.stage_division import StageRoom, divided, even, stage_sums


class Step(msgspec.Struct, frozen=True):
    """What is computed: sequences that decode, and tokens of prompts beside them."""

    rows: int
    prefill: int = 0


class LayerTimes(msgspec.Struct, frozen=True):
    """Seconds that a step takes in each part of a model."""

    layers: list[float]
    embedding: float
    head: float
    """LM head and draw, with what a step takes whatever it computes, less what the last layer is
    spared: behind attention it computes those rows of a prompt alone that are drawn from."""


class StageChoice(msgspec.Struct, frozen=True):
    counts: list[int]
    """Layers of each stage."""
    reason: str
    """In a sentence."""


def choose_stages(
    stages: int,
    decode: tuple[Step, LayerTimes],
    prompts: tuple[Step, LayerTimes],
    prompt_share: float,
    room: StageRoom | None,
) -> StageChoice:
    """The division whose slowest stage is quickest.

    decode: a step of rows alone; prompts: one of a prompt's tokens; prompt_share: of these, for
    each token that is decoded; room: see ``divided``. Raises ``ValueError`` where none fits.
    """
    (step, alone), (full, beside) = decode, prompts
    share = step.rows * prompt_share / full.prefill
    layers = [one + share * more for one, more in zip(alone.layers, beside.layers, strict=True)]
    first = alone.embedding + share * beside.embedding
    last = alone.head + share * beside.head
    counts = divided(layers, stages, last, room, first=first)
    reason = (
        f"measured here: with {step.rows} rows {_parts(alone)}; with {full.prefill} tokens of "
        f"prompts {_parts(beside)}. So those rows and {share * full.prefill:.0f} tokens of prompts "
        f"for them take {_sums(layers, counts, first, last)} in the stages"
    )
    usual = even(len(layers), stages)
    if usual != counts:
        reason += f", with {', '.join(map(str, usual))} layers {_sums(layers, usual, first, last)}"
    if counts != divided(layers, stages, last, first=first):
        reason += ". A quicker division has no room on these devices"
    return StageChoice(list(counts), reason)


def _parts(times: LayerTimes) -> str:
    least, most = min(times.layers), max(times.layers)
    words = f"a layer takes {_ms(most)}"
    if most > 1.02 * least:
        words = f"layers take {_ms(least)} to {_ms(most)}"
    last = times.layers[-1] + times.head
    return f"{words}, the last one with LM head and draw {_ms(last)}"


def _sums(layers: Sequence[float], counts: Sequence[int], first: float, last: float) -> str:
    return ", ".join(map(_ms, stage_sums(layers, counts, last, first=first)))


def _ms(seconds: float) -> str:
    return shown_ms(1e3 * seconds)
