"""Command R, R+ and R7B: attention and MLP in parallel behind one layer norm without bias, rotary
embedding of neighbouring pairs, scaled logits. In R7B (``Cohere2``) only layers with a window are
rotated; R+ norms query and key heads."""

from __future__ import annotations

from penstock.protocol.model_info import ModelInfo
from penstock.services.worker.models.adapter import TensorNames
from penstock.services.worker.models.config_reader import FULL, SLIDING, ConfigReader
from penstock.services.worker.models.specification import Layer, ModelSpecification, Norm


class CohereAdapter:
    architectures = ("CohereForCausalLM", "Cohere2ForCausalLM")
    names = TensorNames()

    def specification(self, info: ModelInfo) -> ModelSpecification:
        reader = ConfigReader(info)
        norm = Norm(reader.positive("layer_norm_eps", 1e-5), "layer")
        bias, mlp = reader.flag("attention_bias", False), reader.mlp()
        base = 10_000.0 if info.architecture == "Cohere2ForCausalLM" else 500_000.0
        rotary = reader.rotary(interleaved=True, theta=reader.positive("rope_theta", base))
        hybrid = info.architecture == "Cohere2ForCausalLM"
        every = reader.period("sliding_window_pattern", 4)
        kinds = reader.kinds(every) if hybrid else [FULL] * reader.num_layers
        windows = reader.windows(every, 4096) if hybrid else [0] * reader.num_layers
        normed = not hybrid and reader.flag("use_qk_norm", False)  # R7B has none, as its code
        layers = []
        for kind, window in zip(kinds, windows, strict=True):
            attention = reader.attention(
                rotary if kind == SLIDING or not hybrid else None,
                window=window,
                qk_norm=norm if normed else None,
                qk_norm_over="each",
                qkv_bias=bias,
                output_bias=bias,
            )
            layers.append(Layer(attention, mlp, norm, None, parallel=True))
        scale = reader.positive("logit_scale", 0.0625)
        return reader.model(layers, norm, tied=True, logit_multiplier=scale)
