"""Slots that ask for adjustments, for the tests of both executors."""

from __future__ import annotations

import numpy as np

from penstock.protocol.wire.messages.steps import SlotAdjustments, SlotSampling


def ids(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def asking(
    temperature: float = 0.0, seed: int = 3, min_p: float = 0.0, **asked: object
) -> SlotSampling:
    adjustments = SlotAdjustments(**asked) if asked else None  # type: ignore[arg-type]
    return SlotSampling(temperature, 0, 1.0, seed, min_p, adjustments)


def biased(**by_name: float) -> dict[str, bytes]:
    """``t7=2.5``: 2.5 is added to the logit of token 7."""
    tokens = [int(name[1:]) for name in by_name]
    return {"biased": ids(*tokens), "biases": np.array([*by_name.values()], "<f4").tobytes()}


EVERY_KIND = [
    asking(repetition=1.8),
    asking(0.9, frequency=1.5, presence=0.5),
    asking(0.9, min_p=0.3),
    asking(allowed=ids(5, 9, 11, 300)),
    asking(1.2, **biased(t40=6.0, t41=-100.0)),
    asking(0.7, min_p=0.05, repetition=0.6, presence=-1.0, allowed=ids(*range(0, 300, 3))),
]
