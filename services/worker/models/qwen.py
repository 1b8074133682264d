"""Qwen2, Qwen2.5 and Qwen3, dense. Qwen3 norms each query and key head; some have windows."""

from __future__ import annotations

from penstock.protocol.model_info import ModelInfo
from penstock.services.worker.models.adapter import TensorNames
from penstock.services.worker.models.config_reader import ConfigReader
from penstock.services.worker.models.specification import Layer, ModelSpecification


class Qwen2Adapter:
    architectures = ("Qwen2ForCausalLM",)
    names = TensorNames()

    def specification(self, info: ModelInfo) -> ModelSpecification:
        reader = ConfigReader(info)
        norm, rotary = reader.rms_norm(), reader.rotary()
        attentions = [
            reader.attention(rotary, window=window, qkv_bias=True) for window in windows(reader)
        ]
        mlp = reader.mlp()
        return reader.model([Layer(each, mlp, norm, norm) for each in attentions], norm)


class Qwen3Adapter:
    architectures = ("Qwen3ForCausalLM",)
    names = TensorNames()

    def specification(self, info: ModelInfo) -> ModelSpecification:
        reader = ConfigReader(info)
        norm, rotary = reader.rms_norm(), reader.rotary(head_dim=128)
        bias, mlp = reader.flag("attention_bias", False), reader.mlp()
        layers = []
        for window in windows(reader):
            attention = reader.attention(
                rotary, head_dim=128, window=window, qk_norm=norm, qkv_bias=bias, output_bias=bias
            )
            layers.append(Layer(attention, mlp, norm, norm))
        return reader.model(layers, norm)


def windows(reader: ConfigReader) -> list[int]:
    """Where windows are used: as ``layer_types`` says, else from ``max_window_layers`` on."""
    if not reader.flag("use_sliding_window", False):
        return [0] * reader.num_layers
    if reader.has("layer_types"):
        return reader.windows(default=4096)
    first, window = reader.count("max_window_layers", 28), reader.window(4096)
    return [window if number >= first else 0 for number in range(reader.num_layers)]
