"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: fused weights, LongRoPE, some with a window."""

from __future__ import annotations

from penstock.protocol.model_info import ModelInfo
from penstock.services.worker.models.adapter import TensorNames
from penstock.services.worker.models.config_reader import ConfigReader
from penstock.services.worker.models.specification import Layer, ModelSpecification, Rotary

TRAINED_POSITIONS = 4096
"""Where ``original_max_position_embeddings`` is absent beside the rotary settings."""


class Phi3Adapter:
    architectures = ("Phi3ForCausalLM",)
    names = TensorNames(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))

    def specification(self, info: ModelInfo) -> ModelSpecification:
        reader = ConfigReader(info)
        norm, rotary = reader.rms_norm(default_eps=1e-5), _rotary(reader)
        mlp = reader.mlp()
        layers = [
            Layer(reader.attention(rotary, window=window), mlp, norm, norm)
            for window in reader.windows()
        ]
        return reader.model(layers, norm)


def _rotary(reader: ConfigReader) -> Rotary:
    """The first folders call LongRoPE "su" or "yarn"; what they were trained for is 4096."""
    return reader.rotary(partial=1.0, trained=TRAINED_POSITIONS, longrope=("su", "yarn"))
