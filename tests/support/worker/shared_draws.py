"""What rows ask for that ranks draw together."""

from __future__ import annotations

from support.worker.asked_slots import EVERY_KIND, asking, ids
from support.worker.plan_driver import GREEDY
from support.worker.sampler_slots import EVERY_SAMPLER

from penstock.protocol.grammar.request import Grammar
from penstock.protocol.wire.messages.steps import Dry, SlotAdjustments, SlotSampling

LIMITED = [
    SlotSampling(0.8, 40, 0.95, 11, 0.02),
    SlotSampling(1.0, 0, 0.7, 3, logprobs=4),
    SlotSampling(1.3, 5, 1.0, 4),
    SlotSampling(0.9, 0, 1.0, 5, 0.2, logprobs=0),
    SlotSampling(0.7, 0, 0.9, 5, adjustments=SlotAdjustments(repetition=1.2, frequency=0.3)),
    SlotSampling(0.9, 0, 1.0, 6, adjustments=SlotAdjustments(grammar=Grammar("regex", "[0-9]+"))),
    GREEDY,
    SlotSampling(0.9, 0, 1.0, 6),
]
WRITTEN = [
    *EVERY_KIND[3:],
    asking(bad_words=[ids(7), ids(200)], min_tokens=2, ends=ids(*range(100, 250))),
    asking(1.1, no_repeat_ngram=3, min_p=0.01, dry=Dry(0.5, 2.0, 1, 9)),
    *EVERY_SAMPLER[:1],
    EVERY_SAMPLER[3],
    SlotSampling(0.9, 0, 1.0, 6),
]
