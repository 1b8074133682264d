"""``ModelAdapter``: what a model family adds: its specification, and the names of its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from penstock.protocol.model_info import ModelInfo
from penstock.services.worker.models.specification import (
    Layer,
    ModelSpecification,
    attention_widths,
)

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.services.worker.models.weights import (
        DecoderWeights,
        LayerWeights,
        LinearWeights,
        NormWeights,
    )


class TensorNames(msgspec.Struct, frozen=True):
    """What a checkpoint calls its weights; the defaults are those of Llama's.

    Of a linear layer that is computed as one, the names of the parts in which it is stored.
    """

    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    lm_head: str = "lm_head"
    layer: str = "model.layers.{}."
    """Ahead of all names below."""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    input_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    attention_output_norm: str = "post_attention_layernorm"
    mlp_output_norm: str = "post_feedforward_layernorm"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"


class ModelAdapter(Protocol):
    """One model family."""

    @property
    def architectures(self) -> tuple[str, ...]:
        """The ``architectures`` entries of ``config.json`` that it serves."""

    @property
    def names(self) -> TensorNames:
        """What its checkpoints call their weights."""

    def specification(self, info: ModelInfo) -> ModelSpecification:
        """Raises ``BadModelFolder`` for a feature that is not implemented."""


def named_tensors(
    names: TensorNames, model: ModelSpecification, weights: DecoderWeights
) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by its name, as a view of the (fused) weights."""
    named = {f"{names.embedding}.weight": weights.embedding} | _norm(names.norm, weights.norm)
    if not model.tie_word_embeddings:
        named[f"{names.lm_head}.weight"] = weights.lm_head
    for index, (layer, part) in enumerate(zip(model.layers, weights.layers, strict=True)):
        prefix = names.layer.format(index)
        named |= {prefix + name: each for name, each in _layer(names, layer, part).items()}
    return named


def may_be_zero(names: TensorNames, model: ModelSpecification) -> Callable[[str], bool]:
    """Tells of a name whether sound checkpoints hold that tensor as zeros: biases of models trained
    without; what writes into the residual stream, in blocks that were added to a model and not yet
    trained; norms that multiply by 1 + weight; sinks, which begin there."""
    suffixes = [".bias", f"{names.output}.weight", f"{names.down}.weight", names.sinks]
    if model.norm.plus_one:
        suffixes.append("norm.weight")
    return lambda name: name.endswith(tuple(suffixes))


def _layer(names: TensorNames, layer: Layer, weights: LayerWeights) -> dict[str, Tensor]:
    queries, keys = attention_widths(layer.attention)
    up = [layer.mlp.width] * (2 if layer.mlp.gated else 1)
    named = {
        **_linear(names.qkv, weights.qkv, [queries, keys, keys]),
        **_linear((names.output,), weights.output, []),
        **_linear(names.up, weights.up, up),
        **_linear((names.down,), weights.down, []),
        **_norm(names.input_norm, weights.input_norm),
        **_norm(names.mlp_norm, weights.mlp_norm),
        **_norm(names.attention_output_norm, weights.attention_output_norm),
        **_norm(names.mlp_output_norm, weights.mlp_output_norm),
    }
    for name, tensor in (
        (names.query_norm, weights.query_norm),
        (names.key_norm, weights.key_norm),
    ):
        if tensor is not None:
            named[f"{name}.weight"] = tensor
    if weights.sinks is not None:
        named[names.sinks] = weights.sinks
    return named


def _linear(names: tuple[str, ...], linear: LinearWeights, sizes: list[int]) -> dict[str, Tensor]:
    """sizes: rows of each part; stored as one where there is one name."""
    from torch import split

    named = {}
    for kind, tensor in (("weight", linear.weight), ("bias", linear.bias)):
        if tensor is not None:
            parts = [tensor] if len(names) == 1 else split(tensor, sizes)
            for name, part in zip(names, parts, strict=True):
                named[f"{name}.{kind}"] = part
    return named


def _norm(name: str, norm: NormWeights | None) -> dict[str, Tensor]:
    if norm is None:
        return {}
    named = {f"{name}.weight": norm.weight}
    return named if norm.bias is None else named | {f"{name}.bias": norm.bias}
