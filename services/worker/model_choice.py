"""Whose code computes a model: a family of our own, or transformers'."""

from __future__ import annotations

from typing import NamedTuple

from penstock.protocol.config import Config
from penstock.protocol.model_info import BadModelFolder, ModelInfo
from penstock.services.worker.models.registry import adapter_for, is_native
from penstock.services.worker.models.specification import ModelSpecification


class ModelChoice(NamedTuple):
    specification: ModelSpecification | None
    """Of a family of our own; ``None``: transformers' code computes the model."""
    refusal: str = ""
    """Why the family of our own that there is does not; empty if it was not asked."""


def choose_model(info: ModelInfo, config: Config) -> ModelChoice:
    """As ``--model-impl`` says. With ``auto`` a model that its family refuses, for a setting that
    it does not implement, is left to transformers; but a quantized one, which is served by none.

    Raises ``BadModelFolder``.
    """
    impl = config.model.model_impl
    if impl == "transformers" or (impl == "auto" and not is_native(info)):
        return ModelChoice(None)
    adapter = adapter_for(info)
    try:
        return ModelChoice(adapter.specification(info))
    except BadModelFolder as refusal:
        if info.config.get("quantization_config") is not None:
            raise
        if impl == "auto":
            return ModelChoice(None, str(refusal))
        raise BadModelFolder(
            f"{refusal}; transformers' code may compute it: --model-impl transformers"
        ) from None
