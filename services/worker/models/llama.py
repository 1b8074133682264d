"""Llama 2 and 3.x: ``LlamaForCausalLM``. Optional biases, and the rope scaling of Llama 3.1."""

from __future__ import annotations

from torch import Tensor

from penstock.protocol.model_info import ModelInfo
from penstock.services.worker.models.adapter import dense_config, dense_tensors
from penstock.services.worker.models.config_reader import ConfigReader
from penstock.services.worker.models.decoder import DecoderConfig, DecoderWeights


class LlamaAdapter:
    architecture = "LlamaForCausalLM"

    def decoder_config(self, info: ModelInfo) -> DecoderConfig:
        reader = ConfigReader(info)
        attention_bias = reader.flag("attention_bias", False)
        return dense_config(
            info,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=reader.flag("mlp_bias", False),
        )

    def named_tensors(self, config: DecoderConfig, weights: DecoderWeights) -> dict[str, Tensor]:
        return dense_tensors(config, weights)
