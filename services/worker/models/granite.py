"""Granite 3, dense: multipliers of embeddings, scores, residuals and logits. Granite SWA has
windows and sinks besides, and a base of the rotary embedding for each layer."""

from __future__ import annotations

from msgspec.structs import replace

from penstock.protocol.model_info import ModelInfo
from penstock.services.worker.models.adapter import TensorNames
from penstock.services.worker.models.config_reader import FULL, SLIDING, ConfigReader
from penstock.services.worker.models.specification import Layer, ModelSpecification, Rotary


class GraniteAdapter:
    architectures = ("GraniteForCausalLM",)
    names = TensorNames()

    def specification(self, info: ModelInfo) -> ModelSpecification:
        reader = ConfigReader(info)
        return _model(reader, [_layer(reader)] * reader.num_layers)


class GraniteSwaAdapter:
    architectures = ("GraniteSWAForCausalLM",)
    names = TensorNames()

    def specification(self, info: ModelInfo) -> ModelSpecification:
        reader = ConfigReader(info)
        plain, kinds, window = _layer(reader), _kinds(reader), reader.window(128)
        layers = []
        for kind, rotary in zip(kinds, _rotaries(reader, info), strict=True):
            windowed = window if kind == SLIDING else 0
            attention = replace(plain.attention, rotary=rotary, window=windowed, sinks=True)
            layers.append(replace(plain, attention=attention))
        return _model(reader, layers, tied=True)


def _kinds(reader: ConfigReader) -> list[str]:
    """Unlike elsewhere the first of each four layers is full, not the last."""
    if reader.has("layer_types"):
        return reader.kinds()
    return [SLIDING if number % 4 else FULL for number in range(reader.num_layers)]


def _rotaries(reader: ConfigReader, info: ModelInfo) -> list[Rotary | None]:
    """Of each layer: ``layer_rope_theta`` has its base, 0 for none."""
    rotary, bases = reader.rotary(), info.config.get("layer_rope_theta")
    if bases is None:
        return [rotary] * reader.num_layers
    good = isinstance(bases, list) and len(bases) == reader.num_layers
    if not good or not all(type(base) in (int, float) and 0 <= base < 1e18 for base in bases):
        raise reader.error(
            f"layer_rope_theta must be a number of 0 or more for each of {reader.num_layers} layers"
        )
    return [
        replace(rotary, parameters=replace(rotary.parameters, theta=float(base))) if base else None
        for base in bases
    ]


def _layer(reader: ConfigReader) -> Layer:
    norm, bias = reader.rms_norm(), reader.flag("attention_bias", False)
    attention = reader.attention(
        reader.rotary(), scale=reader.positive("attention_multiplier", 1.0), qkv_bias=bias,
        output_bias=bias,
    )  # fmt: skip
    mlp = reader.mlp(bias=reader.flag("mlp_bias", False))
    multiplier = reader.positive("residual_multiplier", 1.0)
    return Layer(attention, mlp, norm, norm, residual_multiplier=multiplier)


def _model(reader: ConfigReader, layers: list[Layer], *, tied: bool = False) -> ModelSpecification:
    return reader.model(
        layers,
        reader.rms_norm(),
        tied=tied,
        embedding_multiplier=reader.positive("embedding_multiplier", 1.0),
        logit_multiplier=1.0 / reader.positive("logits_scaling", 1.0),
        multiplies_inputs=True,
    )
