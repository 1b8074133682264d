"""Qwen2 and Qwen2.5: ``Qwen2ForCausalLM``. Biases on queries, keys and values."""

from __future__ import annotations

from torch import Tensor

from penstock.protocol.model_info import ModelInfo
from penstock.services.worker.models.adapter import dense_config, dense_tensors
from penstock.services.worker.models.decoder import DecoderConfig, DecoderWeights


class Qwen2Adapter:
    architecture = "Qwen2ForCausalLM"

    def decoder_config(self, info: ModelInfo) -> DecoderConfig:
        return dense_config(info, qkv_bias=True)

    def named_tensors(self, config: DecoderConfig, weights: DecoderWeights) -> dict[str, Tensor]:
        return dense_tensors(config, weights)
