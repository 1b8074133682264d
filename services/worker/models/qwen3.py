"""Qwen3 dense: ``Qwen3ForCausalLM``. RMSNorm over each query and key head; heads of 128."""

from __future__ import annotations

from torch import Tensor

from penstock.protocol.model_info import ModelInfo
from penstock.services.worker.models.adapter import dense_config, dense_tensors
from penstock.services.worker.models.config_reader import ConfigReader
from penstock.services.worker.models.decoder import DecoderConfig, DecoderWeights

DEFAULT_HEAD_DIM = 128


class Qwen3Adapter:
    architecture = "Qwen3ForCausalLM"

    def decoder_config(self, info: ModelInfo) -> DecoderConfig:
        attention_bias = ConfigReader(info).flag("attention_bias", False)
        return dense_config(
            info,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            qk_norm=True,
            head_dim=DEFAULT_HEAD_DIM,
        )

    def named_tensors(self, config: DecoderConfig, weights: DecoderWeights) -> dict[str, Tensor]:
        return dense_tensors(config, weights)
