"""SmolLM3: every fourth layer has no rotary embedding."""

from __future__ import annotations

from penstock.protocol.model_info import ModelInfo
from penstock.services.worker.models.adapter import TensorNames
from penstock.services.worker.models.config_reader import ConfigReader
from penstock.services.worker.models.specification import Layer, ModelSpecification


class SmolLM3Adapter:
    architectures = ("SmolLM3ForCausalLM",)
    names = TensorNames()

    def specification(self, info: ModelInfo) -> ModelSpecification:
        reader = ConfigReader(info)
        norm, bias = reader.rms_norm(), reader.flag("attention_bias", False)
        mlp = reader.mlp(bias=reader.flag("mlp_bias", False))
        rotary = reader.rotary(theta=reader.positive("rope_theta", 2e6))
        interval = reader.integer("no_rope_layer_interval", 4)
        default = [int((number + 1) % interval != 0) for number in range(reader.num_layers)]
        # The key's name misleads: 1 stands for a layer that is rotated.
        rotated = reader.flags_of_layers("no_rope_layers", default)
        window = reader.window() if reader.flag("use_sliding_window", False) else 0
        windows = [0 if each else window for each in rotated]
        if window and reader.has("layer_types"):
            windows = reader.windows()
        layers = []
        for each, size in zip(rotated, windows, strict=True):
            attention = reader.attention(
                rotary if each else None, window=size, qkv_bias=bias, output_bias=bias
            )
            layers.append(Layer(attention, mlp, norm, norm))
        return reader.model(layers, norm, tied=True)
