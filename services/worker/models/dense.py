"""The decoder that the kernels of GPUs compute, and how a model is brought into its form.

All layers have the same dimensions: RMSNorm, fused QKV projection, optional norm of each query and
key head, rotary embedding, attention, output projection, RMSNorm, fused gate and up projection,
activation·mul, down projection; each half adds to the residual stream, behind a norm of its own
where the model has one. Layers may differ in their window and in their rotary embedding.

What a model has beyond that goes into its weights where it can: norms that multiply by 1 + weight,
multipliers of residuals and logits; heads that are no power of two wide are filled up with zeros;
where only a part of a head is rotated, its elements are reordered so that the pairs lie where the
kernels have them.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from penstock.kernels.rotary import RopeParameters, cos_sin_table
from penstock.services.worker.models.specification import (
    Attention,
    Layer,
    Mlp,
    ModelSpecification,
    Norm,
    Rotary,
)
from penstock.services.worker.models.weights import (
    DecoderWeights,
    LayerWeights,
    NormWeights,
    allocate_weights,
)

LEAST_HEAD, MOST_HEAD = 32, 256
"""Heads of the kernels: powers of two from here to there."""
ACTIVATIONS = ("silu", "gelu_tanh")
"""Those of the kernels' gated MLPs."""


class DenseConfig(msgspec.Struct, frozen=True):
    """Dimensions and options of a decoder with layers of one size."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """As it is computed, filled up with zeros."""
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeParameters
    """Of all layers, if ``rotaries`` is empty."""
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    output_norms: bool = False
    """Norms of what attention and MLP add."""
    activation: str = "silu"
    scale: float = 0.0
    """What scores are multiplied by; 0: 1 / sqrt(head_dim)."""
    softcap: float = 0.0
    windows: tuple[int, ...] = ()
    """Of each layer, 0: none; empty: no layer has one."""
    rotaries: tuple[Rotary | None, ...] = ()
    """Of each layer."""
    embedding_multiplier: float = 1.0
    logit_softcap: float = 0.0

    @property
    def score_scale(self) -> float:
        return self.scale or self.head_dim**-0.5

    @property
    def is_plain(self) -> bool:
        """Whether all attends to everything, with scores as they are."""
        return not any(self.windows) and not self.softcap


class DenseLayer(msgspec.Struct):
    """One layer. Linear weights are [out, in]; an option that is off is ``None``."""

    input_norm: Tensor
    qkv: Tensor
    """[(Hq + 2 Hkv) * D, hidden]: queries, keys, values."""
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    """[2 * I, hidden]: gate, up."""
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    output_norm: Tensor | None = None
    """Of what attention adds."""
    down_norm: Tensor | None = None
    """Of what the MLP adds."""


class DenseWeights(msgspec.Struct):
    embedding: Tensor
    layers: list[DenseLayer]
    norm: Tensor
    lm_head: Tensor
    """[vocab, hidden]; the embedding itself when tied."""


class DenseModel(NamedTuple):
    config: DenseConfig
    weights: DenseWeights


def dense_model(model: ModelSpecification, weights: DecoderWeights) -> DenseModel | str:
    """The model in this form, or why it has none. Weights that must change are replaced: these are
    not those of ``model`` any more."""
    config = dense_config(model)
    if isinstance(config, str):
        return config
    with torch.inference_mode():
        layers = [
            _dense_layer(layer, part, config.head_dim)
            for layer, part in zip(model.layers, weights.layers, strict=True)
        ]
        norm = _norm_weight(model.norm, weights.norm, model.logit_multiplier)
    return DenseModel(config, DenseWeights(weights.embedding, layers, norm, weights.lm_head))


def allocate_dense(config: DenseConfig, dtype: torch.dtype, device: torch.device) -> DenseWeights:
    """Uninitialized weights, for a config without what goes into the weights."""
    model = specification_of(config)
    made = dense_model(model, allocate_weights(model, dtype, device))
    if isinstance(made, str):
        raise ValueError(f"the kernels lack {made}")
    return made.weights


def specification_of(config: DenseConfig) -> ModelSpecification:
    """A model with these dimensions and options."""
    norm = Norm(config.rms_norm_eps)
    behind = norm if config.output_norms else None
    mlp = Mlp(config.intermediate_size, config.activation, True, config.mlp_bias, config.mlp_bias)
    rotary = Rotary(config.rope, config.head_dim)
    layers = []
    for number in range(config.num_layers):
        attention = Attention(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.score_scale,
            config.rotaries[number] if config.rotaries else rotary,
            config.windows[number] if config.windows else 0,
            config.softcap,
            qk_norm=norm if config.qk_norm else None,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
        )
        layers.append(Layer(attention, mlp, norm, norm, behind, behind))
    return ModelSpecification(
        config.vocab_size, config.hidden_size, tuple(layers), norm, config.tie_word_embeddings,
        config.embedding_multiplier, 1.0, config.logit_softcap,
    )  # fmt: skip


def dense_config(model: ModelSpecification) -> DenseConfig | str:
    """The model's form for the kernels, or what they lack for it."""
    layer = model.layers[0]
    attention, mlp = layer.attention, layer.mlp
    lacking = _lacking(model)
    if lacking:
        return ", ".join(lacking)
    windows = tuple(each.attention.window for each in model.layers)
    rotaries = tuple(each.attention.rotary for each in model.layers)
    one = rotaries[0]
    width = _filled_up(attention.head_dim)
    whole = one is not None and one.dim == attention.head_dim == width and len(set(rotaries)) == 1
    usual = attention.scale == width**-0.5
    return DenseConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_layers=len(model.layers),
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=width,
        intermediate_size=mlp.width,
        rms_norm_eps=model.norm.eps,
        rope=one.parameters if one is not None else RopeParameters(1.0),
        tie_word_embeddings=model.tie_word_embeddings,
        qkv_bias=attention.qkv_bias,
        output_bias=attention.output_bias,
        mlp_bias=mlp.down_bias,
        qk_norm=attention.qk_norm is not None,
        output_norms=layer.attention_output_norm is not None,
        activation=mlp.activation,
        scale=0.0 if usual else attention.scale,
        softcap=attention.softcap,
        windows=windows if any(windows) else (),
        rotaries=() if whole else rotaries,
        embedding_multiplier=model.embedding_multiplier,
        logit_softcap=model.logit_softcap,
    )


def _filled_up(head_dim: int) -> int:
    """The width with which heads are computed."""
    return max(LEAST_HEAD, 1 << (head_dim - 1).bit_length())


def _lacking(model: ModelSpecification) -> list[str]:
    """What the kernels lack for a model, in words."""
    layer = model.layers[0]
    attention, mlp = layer.attention, layer.mlp
    alike = {
        replace(each, attention=replace(each.attention, window=0, rotary=None))
        for each in model.layers
    }
    norms = (layer.input_norm, layer.mlp_norm)
    behind = (layer.attention_output_norm, layer.mlp_output_norm)
    width = attention.head_dim
    found = {
        f"{len(alike)} kinds of layers": len(alike) > 1,
        "layers without norms ahead of both halves": None in norms,
        "a norm behind one half alone": (behind[0] is None) != (behind[1] is None),
        "norms that are no RMSNorm, or differ": len({model.norm, *norms, *behind} - {None}) > 1
        or model.norm.kind != "rms",
        "attention and MLP in parallel": layer.parallel,
        "an MLP without a gate": not mlp.gated,
        f"the activation {mlp.activation}": mlp.activation not in ACTIVATIONS,
        "biases in a part of the MLP": mlp.up_bias != mlp.down_bias,
        f"heads of {width}": width > MOST_HEAD,
        "norms of queries and keys over all heads": attention.qk_norm is not None
        and (attention.qk_norm != model.norm or attention.qk_norm_over != "head"),
        f"norms of heads of {width}": attention.qk_norm is not None and width != _filled_up(width),
    }
    return [words for words, there in found.items() if there]


def _dense_layer(layer: Layer, weights: LayerWeights, width: int) -> DenseLayer:
    if layer.input_norm is None or layer.mlp_norm is None:
        raise ValueError("a layer has no norm ahead of a half")
    ahead = [
        _norm_weight(norm, part)
        for norm, part in (
            (layer.input_norm, weights.input_norm),
            (layer.mlp_norm, weights.mlp_norm),
        )
    ]
    _place_heads(layer.attention, weights, width)
    query, key = (
        None if norm is None else _factor(layer.attention.qk_norm, norm)
        for norm in (weights.query_norm, weights.key_norm)
    )
    for linear in (weights.output, weights.down):
        if layer.residual_multiplier != 1.0:
            linear.weight.mul_(layer.residual_multiplier)
            if linear.bias is not None:
                linear.bias.mul_(layer.residual_multiplier)
    return DenseLayer(
        input_norm=ahead[0],
        qkv=weights.qkv.weight,
        qkv_bias=weights.qkv.bias,
        query_norm=query,
        key_norm=key,
        output=weights.output.weight,
        output_bias=weights.output.bias,
        post_norm=ahead[1],
        gate_up=weights.up.weight,
        gate_up_bias=weights.up.bias,
        down=weights.down.weight,
        down_bias=weights.down.bias,
        output_norm=_optional(layer.attention_output_norm, weights.attention_output_norm),
        down_norm=_optional(layer.mlp_output_norm, weights.mlp_output_norm),
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


def _place_heads(attention: Attention, weights: LayerWeights, width: int) -> None:
    """Bring each head's elements to where the kernels have them, in ``width`` elements."""
    dim, heads, kv_heads = attention.head_dim, attention.num_heads, attention.num_kv_heads
    turned = dim if attention.rotary is None else attention.rotary.dim
    if width == dim and turned == dim:
        return
    places = _places(dim, turned, width)
    values = torch.arange(dim)

    def spread(tensor: Tensor, where: Tensor) -> Tensor:
        """[H * D, …] to [H * width, …]."""
        rows = tensor.view(-1, dim, *tensor.shape[1:])
        wide = rows.new_zeros(len(rows), width, *tensor.shape[1:])
        wide[:, where.to(tensor.device)] = rows
        return wide.flatten(0, 1)

    def spread_all(fused: Tensor) -> Tensor:
        both = (heads + kv_heads) * dim
        return torch.cat((spread(fused[:both], places), spread(fused[both:], values)))

    weights.qkv.weight = spread_all(weights.qkv.weight)
    if weights.qkv.bias is not None:
        weights.qkv.bias = spread_all(weights.qkv.bias)
    if weights.query_norm is not None and weights.key_norm is not None:
        weights.query_norm = spread(weights.query_norm, places)
        weights.key_norm = spread(weights.key_norm, places)
    if width != dim:
        columns = weights.output.weight.t().contiguous()
        weights.output.weight = spread(columns, values).t().contiguous()


def _places(dim: int, turned: int, width: int) -> Tensor:
    """Where each of a head's ``dim`` elements goes, so that the ``turned`` first ones are pairs
    (i, i + width / 2) and the rest fills the places that are left."""
    half = turned // 2
    pairs = [*range(half), *range(width // 2, width // 2 + half)]
    left = [place for place in range(width) if place not in set(pairs)]
    return torch.tensor(pairs + left[: dim - turned])


def tables_of(config: DenseConfig) -> list[Rotary | None]:
    """The rotary embedding of each layer."""
    return list(config.rotaries) or [Rotary(config.rope, config.head_dim)] * config.num_layers


def half_tables(
    rotary: Rotary | None, width: int, max_positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [max_positions, width / 2] fp32 of the pairs (i, i + width / 2): those that
    are not rotated have cosine 1."""
    cos = torch.ones(max_positions, width // 2, dtype=torch.float32, device=device)
    sin = torch.zeros_like(cos)
    if rotary is not None:
        half = rotary.dim // 2
        whole = cos_sin_table(rotary.dim, max_positions, rotary.parameters, device)
        cos[:, :half], sin[:, :half] = whole[0][:, :half], whole[1][:, half:]
    return cos, sin
