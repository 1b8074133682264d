"""Granite 3, dense: multipliers of embeddings, scores, residuals and logits."""

from __future__ import annotations

from penstock.protocol.model_info import ModelInfo
from penstock.services.worker.models.adapter import TensorNames
from penstock.services.worker.models.config_reader import ConfigReader
from penstock.services.worker.models.specification import Layer, ModelSpecification


class GraniteAdapter:
    architectures = ("GraniteForCausalLM",)
    names = TensorNames()

    def specification(self, info: ModelInfo) -> ModelSpecification:
        reader = ConfigReader(info)
        norm, bias = reader.rms_norm(), reader.flag("attention_bias", False)
        attention = reader.attention(
            reader.rotary(), scale=reader.positive("attention_multiplier", 1.0), qkv_bias=bias,
            output_bias=bias,
        )  # fmt: skip
        mlp = reader.mlp(bias=reader.flag("mlp_bias", False))
        multiplier = reader.positive("residual_multiplier", 1.0)
        layer = Layer(attention, mlp, norm, norm, residual_multiplier=multiplier)
        return reader.model(
            [layer] * reader.num_layers,
            norm,
            embedding_multiplier=reader.positive("embedding_multiplier", 1.0),
            logit_multiplier=1.0 / reader.positive("logits_scaling", 1.0),
        )
