"""EXAONE 4: norms behind attention and MLP, and of query and key heads. Where some layers have a
window, only these have a rotary embedding."""

from __future__ import annotations

from penstock.protocol.model_info import ModelInfo
from penstock.services.worker.models.adapter import TensorNames
from penstock.services.worker.models.config_reader import SLIDING, ConfigReader
from penstock.services.worker.models.specification import Layer, ModelSpecification


class Exaone4Adapter:
    architectures = ("Exaone4ForCausalLM",)
    names = TensorNames()

    def specification(self, info: ModelInfo) -> ModelSpecification:
        reader = ConfigReader(info)
        norm, rotary, mlp = reader.rms_norm(default_eps=1e-5), reader.rotary(), reader.mlp()
        every = reader.period("sliding_window_pattern", 4)
        hybrid = reader.has_window(default=4096)
        kinds, windows = reader.kinds(every), reader.windows(every, 4096)
        layers = []
        for kind, window in zip(kinds, windows, strict=True):
            rotated = rotary if kind == SLIDING or not hybrid else None
            attention = reader.attention(rotated, window=window, qk_norm=norm)
            layers.append(Layer(attention, mlp, None, None, norm, norm))
        return reader.model(layers, norm)
