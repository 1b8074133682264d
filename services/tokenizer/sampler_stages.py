"""The samplers that a request asks for, in its order, as a worker's slot is told them."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.protocol.sampler_parameters import order_of
from penstock.protocol.sampling import GREEDY_TEMPERATURE, SamplingParams
from penstock.protocol.wire.messages.steps import SamplerStage

_PLAIN = ("temperature", "min_p", "top_k", "top_p")
"""What a slot has without stages, in the order in which they act there."""


def sampler_stages(params: SamplingParams) -> list[SamplerStage]:
    """params: resolved. Empty where the request asks for nothing but a temperature, min_p, top_k
    and top_p, in this order, or for the likeliest token."""
    if (params.temperature or 0.0) < GREEDY_TEMPERATURE:
        return []
    asked = _asked(params)
    stages = [asked[name] for name in order_of(params) if name in asked]
    names = [stage.sampler for stage in stages]
    if names == [name for name in _PLAIN if name in names]:
        return []
    return stages


def _asked(params: SamplingParams) -> dict[str, SamplerStage]:
    """By the name that an order has for it."""
    p = params
    temperature = p.temperature or 0.0
    found: dict[str, tuple[str, bool, Sequence[float | None]]] = {
        "temperature": ("temperature", temperature != 1.0, [temperature]),
        "nsigma": ("nsigma", p.nsigma > 0, [p.nsigma]),
        "top_a": ("top_a", p.top_a > 0, [p.top_a]),
        "min_p": ("min_p", bool(p.min_p), [p.min_p]),
        "tfs": ("tfs", p.tfs < 1, [p.tfs]),
        "eta_cutoff": ("eta_cutoff", p.eta_cutoff > 0, [p.eta_cutoff]),
        "epsilon_cutoff": ("epsilon_cutoff", p.epsilon_cutoff > 0, [p.epsilon_cutoff]),
        "typical_p": ("typical_p", p.typical_p < 1, [p.typical_p]),
        "smoothing": (
            "smoothing", p.smoothing_factor > 0, [p.smoothing_factor, p.smoothing_curve],
        ),
        "xtc": ("xtc", p.xtc_probability > 0, [p.xtc_threshold, p.xtc_probability]),
        "skew": ("skew", p.skew != 0, [p.skew]),
        "top_k": ("top_k", (p.top_k or 0) > 0, [p.top_k]),
        "top_p": ("top_p", p.top_p is not None and p.top_p < 1, [p.top_p]),
        "mirostat": ("mirostat", p.mirostat_mode == 2, [p.mirostat_tau, p.mirostat_eta]),
    }  # fmt: skip
    if p.dynatemp_max > 0:
        numbers = [p.dynatemp_min, p.dynatemp_max, p.dynatemp_exponent]
        found["temperature"] = ("dynamic_temperature", True, numbers)
    return {
        place: SamplerStage(name, [float(one or 0.0) for one in values])
        for place, (name, on, values) in found.items()
        if on
    }
