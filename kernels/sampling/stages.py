"""A slot's samplers one after the other, as the last adjustment of its row.

What they leave is drawn at a temperature of 1 and without limits: a row's stages hold these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.draw_keys import UInt64Array
from penstock.kernels.sampling.row_sums import row_logsumexp
from penstock.kernels.sampling.rows import IntArray
from penstock.kernels.sampling.samplers import MIROSTAT, SAMPLERS, XTC
from penstock.kernels.sampling.samplers.xtc import coin


class Stage(NamedTuple):
    sampler: str
    """A name of ``SAMPLERS``."""
    values: Sequence[float]


class SamplerStages(NamedTuple):
    """An adjustment of the A rows ``rows``, ascending."""

    rows: IntArray
    stages: Sequence[Sequence[Stage]]
    """Of each row."""
    keys: UInt64Array
    """[A]: those of each row's draw."""
    bounds: list[float]
    """[A]: each row's bound of Mirostat; of other rows it means nothing."""

    def apply(self, logits: Tensor, place: IntArray) -> None:
        """Change rows in place, one by one: no row's numbers depend on another. See
        ``Adjustment``."""
        of_rows = zip(self.rows.tolist(), self.stages, self.keys.tolist(), self.bounds, strict=True)
        for row, stages, key, bound in of_rows:
            z = logits[int(place[row])]
            if z.max().isfinite():
                z.copy_(through_stages(z.double(), stages, key, bound))


def through_stages(z: Tensor, stages: Sequence[Stage], key: int, bound: float) -> Tensor:
    """What the stages make of a row [V] float64 that has a finite logit, and none above all."""
    for name, values in stages:
        numbers = [bound] if name == MIROSTAT else [*values, coin(key)] if name == XTC else values
        z = SAMPLERS[name].apply(z, *numbers)
    return z


def model_logprob(logits: Tensor, token: int) -> float:
    """The logprob of a token in a row [V] as the model made it, rounded to fp32."""
    z = logits.double()
    return float((z[token] - row_logsumexp(z)).to(torch.float32))
