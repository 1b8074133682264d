"""Whether a model that was loaded can be computed as ``--deterministic`` asks."""

from __future__ import annotations

import torch

from penstock.protocol.config import Config, ConfigError
from penstock.services.worker.loaded_model import AttentionAlone, words_of_others
from penstock.services.worker.models.causal_model import CausalModel
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.dense_form import DenseModel


def check_deterministic(
    config: Config, model: CausalModel, kernels: DenseModel | AttentionAlone | str
) -> None:
    """Raises ``ConfigError`` where a row's bits would depend on what else a step has."""
    if config.device.deterministic and (reason := _why_not(model, kernels)):
        raise ConfigError(f"--deterministic: {reason}; leave it out")


def _why_not(model: CausalModel, kernels: DenseModel | AttentionAlone | str) -> str:
    if not isinstance(model, Decoder):
        return f"{words_of_others(model)}, whose sums have no order that is known"
    if model.quantized:
        return "the model's weights are quantized, and it is for plain ones"
    if model.device.type == "cpu":
        if model.dtype != torch.float32:
            return f"a CPU has one order of sums in float32, not in {model.dtype}; --dtype float32"
        return ""
    if not isinstance(kernels, DenseModel):
        reason = kernels if isinstance(kernels, str) else kernels.reason
        return f"Penstock's kernels do not compute this model: {reason}"
    from penstock.services.worker.gpu.fixed_decoder import why_not_fixed

    return why_not_fixed(kernels.config)
