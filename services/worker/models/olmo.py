"""OLMo 2 and 3: norms behind attention and MLP, none ahead of them; queries and keys are normed
over all heads together. In OLMo 3 most layers have a window."""

from __future__ import annotations

from penstock.protocol.model_info import ModelInfo
from penstock.services.worker.models.adapter import TensorNames
from penstock.services.worker.models.config_reader import FULL, ConfigReader
from penstock.services.worker.models.specification import Layer, ModelSpecification


class OlmoAdapter:
    architectures = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
    names = TensorNames()

    def specification(self, info: ModelInfo) -> ModelSpecification:
        reader = ConfigReader(info)
        norm, bias = reader.rms_norm(default_eps=1e-5), reader.flag("attention_bias", False)
        kinds, windows, base = [FULL] * reader.num_layers, [0] * reader.num_layers, 10_000.0
        if info.architecture == "Olmo3ForCausalLM":
            kinds, windows, base = reader.kinds(4), reader.windows(4, 4096), 500_000.0
        theta = reader.positive("rope_theta", base)
        rotaries = {kind: reader.rotary(kind, theta=theta) for kind in set(kinds)}
        layers = []
        for kind, window in zip(kinds, windows, strict=True):
            attention = reader.attention(
                rotaries[kind], window=window, qk_norm=norm, qk_norm_over="all", qkv_bias=bias,
                output_bias=bias,
            )  # fmt: skip
            layers.append(Layer(attention, reader.mlp(), None, None, norm, norm))
        return reader.model(layers, norm)
