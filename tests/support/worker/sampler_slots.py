"""Slots that ask for samplers of every kind, for the tests of both executors."""

from __future__ import annotations

from support.worker.asked_slots import asking, ids

from penstock.protocol.wire.messages.steps import Dry, SamplerStage, SlotSampling


def staged(
    *stages: tuple[str, list[float]], temperature: float = 1.0, **asked: object
) -> SlotSampling:
    made = [SamplerStage(name, values) for name, values in stages]
    return asking(temperature, stages=made, **asked)


MIROSTAT = staged(("mirostat", [4.0, 0.4]))
EVERY_SAMPLER = [
    staged(("temperature", [1.6]), ("tfs", [0.95]), ("xtc", [0.002, 0.5])),
    staged(("dynamic_temperature", [0.5, 1.5, 1.0]), ("top_a", [0.1]), ("skew", [-0.4])),
    MIROSTAT,
    staged(("typical_p", [0.8]), ("mirostat", [3.0, 0.5]), ("temperature", [0.8]), repetition=1.3),
    staged(("smoothing", [0.4, 1.5]), ("nsigma", [2.0]), dry=Dry(0.8, 1.75, 2, 0, ids(11))),
    staged(("eta_cutoff", [0.01]), ("top_p", [0.9]), ("epsilon_cutoff", [0.004])),
    asking(0.9, dry=Dry(2.0, 1.5, 1), frequency=0.4),
    asking(no_repeat_ngram=2),
    asking(1.1, no_repeat_ngram=3, min_p=0.01, dry=Dry(0.5, 2.0, 1, 9)),
]
