"""The decoder that the kernels of GPUs compute, and how a model is brought into its form.

All layers have the same dimensions: RMSNorm, fused QKV projection, optional norm of each query and
key head, rotary embedding, attention, output projection, RMSNorm, fused gate and up projection,
activation·mul, down projection; each half adds to the residual stream, behind a norm of its own
where the model has one. Layers may differ in their window and in their rotary embedding.

What a model has beyond that goes into its weights where it can: norms that multiply by 1 + weight,
multipliers of residuals and logits; where only a part of a head is rotated, its elements are
reordered so that the pairs lie where the kernels have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from penstock.kernels.rope_parameters import RopeParameters
from penstock.services.worker.models.specification import (
    Attention,
    CacheSpecification,
    Layer,
    Mlp,
    ModelSpecification,
    Norm,
    Rotary,
)

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.services.worker.models.linear import Linear
    from penstock.services.worker.models.linear_specification import LayerLinears

MOST_HEAD = 256
"""Heads of the kernels: even numbers up to it."""
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
    sinks: bool = False

    @property
    def score_scale(self) -> float:
        return self.scale or self.head_dim**-0.5


class DenseLayer(msgspec.Struct):
    """One layer. A norm that is off is ``None``."""

    linears: LayerLinears[Linear]
    input_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    post_norm: Tensor
    output_norm: Tensor | None = None
    """Of what attention adds."""
    down_norm: Tensor | None = None
    """Of what the MLP adds."""
    sinks: Tensor | None = None


class DenseWeights(msgspec.Struct):
    embedding: Tensor
    layers: list[DenseLayer]
    norm: Tensor
    lm_head: Linear
    """Its weight is the embedding itself when tied."""

    @property
    def quantized(self) -> bool:
        """Whether any of the products is."""
        linears = (linear for layer in self.layers for linear in layer.linears)
        return self.lm_head.quantized or any(linear.quantized for linear in linears)


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
            sinks=config.sinks,
        )
        layers.append(Layer(attention, mlp, norm, norm, behind, behind))
    return ModelSpecification(
        config.vocab_size, config.hidden_size, tuple(layers), norm, config.tie_word_embeddings,
        config.embedding_multiplier, 1.0, config.logit_softcap,
    )  # fmt: skip


def dense_config(model: ModelSpecification) -> DenseConfig | str:
    """The model's form for the kernels, or what they lack for it."""
    heads = {layer.attention.head_dim for layer in model.layers}
    lacking = [*_lacking(model), *(f"heads of {dim}" for dim in sorted(heads) if not _fit(dim))]
    return ", ".join(lacking) or _config(model)


def dimensions(model: ModelSpecification) -> DenseConfig | str:
    """As ``dense_config``, with heads of any size: to count what a model takes."""
    lacking = _lacking(model)
    return ", ".join(lacking) or _config(model)


def paged_config(
    caches: Sequence[CacheSpecification], hidden: int, mlp_width: int, vocab: int
) -> DenseConfig | str:
    """The dimensions of a model of which the kernels compute attention alone, or what they lack.

    mlp_width: numbers of a row between the products of the widest MLP.
    """
    shapes = {(cache.num_kv_heads, cache.head_dim, cache.num_heads) for cache in caches}
    if len(shapes) > 1:
        return "layers with different heads"
    kv_heads, dim, heads = shapes.pop()
    if not _fit(dim):
        return f"heads of {dim}"
    if heads % kv_heads:
        return f"{heads} heads for {kv_heads} KV heads"
    return DenseConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=len(caches),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        intermediate_size=-(-mlp_width // 2),
        rms_norm_eps=0.0,
        rope=RopeParameters(1.0),
        tie_word_embeddings=False,
    )


def _config(model: ModelSpecification) -> DenseConfig:
    (layer,) = _kinds(model)
    attention, mlp = layer.attention, layer.mlp
    windows = tuple(each.attention.window for each in model.layers)
    rotaries = tuple(each.attention.rotary for each in model.layers)
    one, *others = dict.fromkeys(rotaries)
    whole = one is not None and one.dim == attention.head_dim and not others
    usual = attention.scale == attention.head_dim**-0.5
    return DenseConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_layers=len(model.layers),
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
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
        sinks=attention.sinks,
    )


def _kinds(model: ModelSpecification) -> list[Layer]:
    """The distinct layers, but for what layers may differ in."""
    return list(
        dict.fromkeys(
            replace(each, attention=replace(each.attention, window=0, rotary=None))
            for each in model.layers
        )
    )


def _lacking(model: ModelSpecification) -> list[str]:
    """What the kernels lack for a model, in words."""
    kinds = _kinds(model)
    found = _differences(kinds) if len(kinds) > 1 else []
    for layer in kinds:
        found += _lacking_of(layer, model.norm)
    return list(dict.fromkeys(found))


def _differences(kinds: Sequence[Layer]) -> list[str]:
    """What the kernels have for layers that are alike alone."""
    heads = {
        (each.attention.num_heads, each.attention.num_kv_heads, each.attention.head_dim)
        for each in kinds
    }
    found = {
        "layers with different heads": len(heads) > 1,
        "MLPs of different widths": len({each.mlp.width for each in kinds}) > 1,
    }
    words = [words for words, there in found.items() if there]
    return words or [f"{len(kinds)} kinds of layers"]


def _lacking_of(layer: Layer, norm: Norm) -> list[str]:
    """norm: ahead of the LM head."""
    attention, mlp = layer.attention, layer.mlp
    norms = (layer.input_norm, layer.mlp_norm)
    behind = (layer.attention_output_norm, layer.mlp_output_norm)
    found = {
        "layers without norms ahead of both halves": None in norms,
        "a norm behind one half alone": (behind[0] is None) != (behind[1] is None),
        "norms that are no RMSNorm, or differ": len({norm, *norms, *behind} - {None}) > 1
        or norm.kind != "rms",
        "attention and MLP in parallel": layer.parallel,
        "mixtures of experts": mlp.experts is not None,
        "an MLP without a gate": not mlp.gated,
        f"the activation {mlp.activation}": mlp.activation not in ACTIVATIONS,
        "biases in a part of the MLP": mlp.up_bias != mlp.down_bias,
        "attention in chunks or to chosen blocks": attention.chunk > 0 or any(attention.besides),
        "norms of queries and keys over all heads": attention.qk_norm is not None
        and (attention.qk_norm != norm or attention.qk_norm_over != "head"),
    }
    return [words for words, there in found.items() if there]


def _fit(head_dim: int) -> bool:
    """Whether the kernels take heads of this size."""
    return head_dim <= MOST_HEAD and head_dim % 2 == 0


def tables_of(config: DenseConfig) -> list[Rotary | None]:
    """The rotary embedding of each layer."""
    return list(config.rotaries) or [Rotary(config.rope, config.head_dim)] * config.num_layers


def caches_of(config: DenseConfig) -> list[CacheSpecification]:
    """What each layer keeps."""
    return [
        CacheSpecification(
            config.num_kv_heads, config.head_dim, config.num_heads, window, config.softcap,
            config.scale, config.sinks,
        )
        for window in config.windows or (0,) * config.num_layers
    ]  # fmt: skip
