"""Mistral 7B, Nemo, Small (``MistralForCausalLM``) and Ministral: some with a window."""

from __future__ import annotations

from penstock.protocol.model_info import ModelInfo
from penstock.services.worker.models.adapter import TensorNames
from penstock.services.worker.models.config_reader import ConfigReader
from penstock.services.worker.models.specification import Layer, ModelSpecification


class MistralAdapter:
    architectures = ("MistralForCausalLM", "MinistralForCausalLM")
    names = TensorNames()

    def specification(self, info: ModelInfo) -> ModelSpecification:
        reader = ConfigReader(info)
        norm, rotary, mlp = reader.rms_norm(), reader.rotary(), reader.mlp()
        layers = [
            Layer(reader.attention(rotary, window=window), mlp, norm, norm)
            for window in reader.windows(default=4096)
        ]
        return reader.model(layers, norm)
