"""Llama 2 and 3.x, SmolLM 2, Falcon 3, and what else is ``LlamaForCausalLM``."""

from __future__ import annotations

from penstock.protocol.model_info import ModelInfo
from penstock.services.worker.models.adapter import TensorNames
from penstock.services.worker.models.config_reader import ConfigReader
from penstock.services.worker.models.specification import Layer, ModelSpecification


class LlamaAdapter:
    architectures = ("LlamaForCausalLM",)
    names = TensorNames()

    def specification(self, info: ModelInfo) -> ModelSpecification:
        reader = ConfigReader(info)
        norm, bias = reader.rms_norm(), reader.flag("attention_bias", False)
        attention = reader.attention(reader.rotary(), qkv_bias=bias, output_bias=bias)
        mlp = reader.mlp(bias=reader.flag("mlp_bias", False))
        return reader.model([Layer(attention, mlp, norm, norm)] * reader.num_layers, norm)
