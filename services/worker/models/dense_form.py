"""Brings a model's weights into the form that the kernels of GPUs compute: see ``dense``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.rotary import inverse_frequencies
from penstock.services.worker.models.dense import (
    DenseConfig,
    DenseLayer,
    DenseWeights,
    specification_of,
)
from penstock.services.worker.models.specification import (
    Attention,
    Layer,
    ModelSpecification,
    Norm,
    Rotary,
)
from penstock.services.worker.models.weight_words import give_words
from penstock.services.worker.models.weights import (
    DecoderWeights,
    LayerWeights,
    NormWeights,
    allocate_weights,
    reorder_heads,
)


class DenseModel(NamedTuple):
    config: DenseConfig
    weights: DenseWeights


def dense_model(
    config: DenseConfig, model: ModelSpecification, weights: DecoderWeights
) -> DenseModel:
    """The model in this form, with the ``config`` that ``dense_config`` has made of it.

    Changes ``weights`` in place (elements of heads are reordered, residual multipliers multiplied
    in, quantized weights become words): call it once for them. They do not belong to ``model`` any
    more.
    """
    with torch.inference_mode():
        layers = [
            _dense_layer(layer, part)
            for layer, part in zip(model.layers, weights.layers, strict=True)
        ]
        norm = _norm_weight(model.norm, weights.norm, model.logit_multiplier)
        give_words([*(each for layer in layers for each in layer.linears), weights.lm_head])
    return DenseModel(config, DenseWeights(weights.embedding, layers, norm, weights.lm_head))


def allocate_dense(config: DenseConfig, dtype: torch.dtype, device: torch.device) -> DenseWeights:
    """Uninitialized weights, for a config without what goes into the weights."""
    model = specification_of(config)
    return dense_model(config, model, allocate_weights(model, dtype, device)).weights


def _dense_layer(layer: Layer, weights: LayerWeights) -> DenseLayer:
    if layer.input_norm is None or layer.mlp_norm is None:
        raise ValueError("a layer has no norm ahead of a half")
    ahead = [
        _norm_weight(norm, part)
        for norm, part in (
            (layer.input_norm, weights.input_norm),
            (layer.mlp_norm, weights.mlp_norm),
        )
    ]
    _pair_up(layer.attention, weights)
    query, key = (
        None if norm is None else _factor(layer.attention.qk_norm, norm)
        for norm in (weights.query_norm, weights.key_norm)
    )
    for linear in (weights.linears.output, weights.linears.down):
        linear.multiply_by(layer.residual_multiplier)
    return DenseLayer(
        linears=weights.linears,
        input_norm=ahead[0],
        query_norm=query,
        key_norm=key,
        post_norm=ahead[1],
        output_norm=_optional(layer.attention_output_norm, weights.attention_output_norm),
        down_norm=_optional(layer.mlp_output_norm, weights.mlp_output_norm),
        sinks=weights.sinks,
    )


def _optional(norm: Norm | None, weights: NormWeights | None) -> Tensor | None:
    return None if norm is None else _norm_weight(norm, weights)


def _norm_weight(norm: Norm, weights: NormWeights | None, multiplier: float = 1.0) -> Tensor:
    """The factors of a norm: as stored, or in fp32 where they are not what is stored."""
    if weights is None:
        raise ValueError("a norm has no weights")
    factor = _factor(norm, weights.weight)
    return factor if multiplier == 1.0 else factor.float() * multiplier


def _factor(norm: Norm | None, weight: Tensor) -> Tensor:
    return weight.float() + 1.0 if norm is not None and norm.plus_one else weight


def _pair_up(attention: Attention, weights: LayerWeights) -> None:
    """Reorder the elements of each query and key head so that rotated pairs lie half a head
    apart."""
    dim, rotary = attention.head_dim, attention.rotary
    if rotary is not None and rotary.dim != dim:
        reorder_heads(attention, _order(dim, rotary.dim), weights)


def _order(dim: int, rotary_dim: int) -> Tensor:
    """Which of a head's ``dim`` elements stands at each place, so that the ``rotary_dim`` first
    ones are pairs (i, i + dim / 2) and the rest fills the places that are left."""
    half = rotary_dim // 2
    rest = iter(range(rotary_dim, dim))
    first = [place if place < half else next(rest) for place in range(dim // 2)]
    second = [half + place if place < half else next(rest) for place in range(dim // 2)]
    return torch.tensor(first + second)


def half_tables(
    rotary: Rotary | None, width: int, max_positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [max_positions, width / 2] fp32 of the pairs (i, i + width / 2): those that
    are not rotated have cosine 1.

    They are made in the host's memory, with the numbers of ``cos_sin_table``: of the device's
    memory nothing but the tables is taken.
    """
    cos = torch.ones(max_positions, width // 2, dtype=torch.float32)
    sin = torch.zeros_like(cos)
    if rotary is not None:
        half, factor = rotary.dim // 2, rotary.parameters.attention_factor
        cosines, sines = cos[:, :half], sin[:, :half]
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = sines  # until their sines take their place
        torch.mul(
            positions[:, None],
            inverse_frequencies(rotary.dim, rotary.parameters),
            out=angles,
        )
        torch.cos(angles, out=cosines)
        sines.sin_().mul_(factor)
        cosines.mul_(factor)
    return cos.to(device), sin.to(device)
