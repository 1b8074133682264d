"""OLMo 2 and 3: norms behind attention and MLP, none ahead of them; queries and keys are normed
over all heads together. In OLMo 3 most layers have a window."""

from __future__ import annotations

from penstock.protocol.model_info import ModelInfo
from penstock.services.worker.models.adapter import TensorNames
from penstock.services.worker.models.config_reader import FULL, SLIDING, ConfigReader
from penstock.services.worker.models.specification import Layer, ModelSpecification, Rotary

THETA = 500_000.0
"""Of OLMo 3."""


class OlmoAdapter:
    architectures = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
    names = TensorNames()

    def specification(self, info: ModelInfo) -> ModelSpecification:
        reader = ConfigReader(info)
        norm, bias = reader.rms_norm(default_eps=1e-5), reader.flag("attention_bias", False)
        kinds, windows = [FULL] * reader.num_layers, [0] * reader.num_layers
        if info.architecture == "Olmo3ForCausalLM":
            kinds, windows = reader.kinds(4), reader.windows(4, 4096)
            rotaries = _rotaries(reader, kinds)
        else:
            rotaries = {FULL: reader.rotary()}
        layers = []
        for kind, window in zip(kinds, windows, strict=True):
            attention = reader.attention(
                rotaries[kind], window=window, qk_norm=norm, qk_norm_over="all", qkv_bias=bias,
                output_bias=bias,
            )  # fmt: skip
            layers.append(Layer(attention, reader.mlp(), None, None, norm, norm))
        return reader.model(layers, norm)


def _rotaries(reader: ConfigReader, kinds: list[str]) -> dict[str, Rotary]:
    """Of OLMo 3. Transformers 4 gives layers with a window the base ``rope_theta``, transformers 5
    its own default; it is refused where that is another one."""
    theta = reader.positive("rope_theta", THETA)
    rotaries = reader.rotary_of_kinds(theta, theta)
    if theta != THETA and SLIDING in kinds and rotaries[SLIDING].parameters.theta == theta:
        raise reader.error(
            f"rope_theta {theta:g}: versions of transformers differ about its meaning for layers "
            "with a window; give a rope_theta for each kind of layers in rope_parameters"
        )
    return rotaries
