"""Whose code computes a model: a family of our own, or transformers'."""

from __future__ import annotations

from typing import NamedTuple

from penstock.protocol.config import Config
from penstock.protocol.model_info import BadModelFolder, ModelInfo
from penstock.services.worker.models.experts import num_experts, words_of_experts
from penstock.services.worker.models.registry import (
    ADAPTERS,
    adapter_for,
    is_native,
    own_specification,
)
from penstock.services.worker.models.specification import ModelSpecification
from penstock.services.worker.quantization.quantization import Quantization
from penstock.services.worker.quantization.reading import read_quantization


class ModelChoice(NamedTuple):
    specification: ModelSpecification | None
    """Of a family of our own; ``None``: transformers' code computes the model."""
    refusal: str = ""
    """Why the family of our own that there is does not; empty if it was not asked."""


def choose_model(info: ModelInfo, config: Config) -> ModelChoice:
    """As ``--model-impl`` says. With ``auto`` a model that its family refuses, for a setting that
    it does not implement, is left to transformers; but a quantized one, which that code does not
    compute here.

    Raises ``BadModelFolder``.
    """
    impl = config.model.model_impl
    quantization = read_quantization(info, config.model.quantization)
    if impl == "transformers" or (impl == "auto" and not is_native(info)):
        if quantization is not None:
            raise BadModelFolder(_not_by_transformers(info, quantization))
        return ModelChoice(None)
    adapter_for(info)  # whose package may be broken, which no other code mends
    try:
        return ModelChoice(own_specification(info))
    except BadModelFolder as refusal:
        if quantization is not None:
            raise
        if impl == "auto":
            return ModelChoice(None, str(refusal))
        raise BadModelFolder(
            f"{refusal}; transformers' code may compute it: --model-impl transformers"
        ) from None


def _not_by_transformers(info: ModelInfo, quantization: Quantization) -> str:
    asked = (
        f"--quantization {quantization.method}"
        if quantization.online
        else f"the weights are quantized ({quantization.method})"
    )
    count = num_experts(info)
    experts = f" ({words_of_experts(info.architecture, count)})" if count else ""
    return (
        f"{info.folder / 'config.json'}: {asked}, and {info.architecture} is computed by "
        f"transformers' code{experts}, for which weights must be plain: quantized layers are those "
        f"of {', '.join(sorted(ADAPTERS))}"
    )
