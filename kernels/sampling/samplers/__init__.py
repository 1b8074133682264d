"""Samplers, a file each: what a row's logits become, as a formula in numpy and in torch.

Every file has a ``reference`` of one row in numpy float64 and the same as ``apply`` in torch, also
in float64: a row's stages act on what the one before has left, and only the last result is rounded
to fp32. Each takes the row z [V] and its numbers, and returns a row: -inf where a token is dropped.
The highest token that is left is dropped by none but ``typical_p`` and ``xtc``, which leave
another. ``penstock.kernels.gpu.sampler_stages`` has the same for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.kernels.sampling.samplers import (
    dynamic_temperature,
    epsilon_cutoff,
    eta_cutoff,
    min_p,
    mirostat,
    nsigma,
    skew,
    smoothing,
    tail_free,
    temperature,
    top_a,
    top_k,
    top_p,
    typical_p,
    xtc,
)

MIROSTAT = "mirostat"
XTC = "xtc"


class Sampler(NamedTuple):
    number: int
    """What the GPU calls it."""
    reference: Callable[..., Any]
    apply: Callable[..., Any]


_MODULES = {
    "temperature": temperature,
    "dynamic_temperature": dynamic_temperature,
    "nsigma": nsigma,
    "top_a": top_a,
    "min_p": min_p,
    "tfs": tail_free,
    "eta_cutoff": eta_cutoff,
    "epsilon_cutoff": epsilon_cutoff,
    "typical_p": typical_p,
    "smoothing": smoothing,
    XTC: xtc,
    "skew": skew,
    "top_k": top_k,
    "top_p": top_p,
    MIROSTAT: mirostat,
}
SAMPLERS: dict[str, Sampler] = {
    name: Sampler(number, module.reference, module.apply)
    for number, (name, module) in enumerate(_MODULES.items())
}
"""By the name that a stage has in ``SlotAdjustments.stages``."""
