"""The weights of a decoder: memory for what a specification has, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from penstock.services.worker.models.adapter import LLAMA_NAMES, TensorNames
from penstock.services.worker.models.linear import Linear, SummedLinear, VocabularyLinear
from penstock.services.worker.models.linear_specification import (
    LayerLinears,
    LinearSpecification,
    model_linears,
)
from penstock.services.worker.models.quantized_linear import (
    QuantizedLinear,
    SummedQuantizedLinear,
    VocabularyQuantizedLinear,
)
from penstock.services.worker.models.specification import (
    Attention,
    Layer,
    ModelSpecification,
    Norm,
)
from penstock.services.worker.quantization.quantization import Quantization

if TYPE_CHECKING:
    from penstock.services.worker.rank_group import RankGroup


class NormWeights(msgspec.Struct):
    weight: Tensor
    bias: Tensor | None = None


class LayerWeights(msgspec.Struct):
    """One layer; what its specification leaves out is ``None``."""

    linears: LayerLinears[Linear]
    input_norm: NormWeights | None
    mlp_norm: NormWeights | None
    attention_output_norm: NormWeights | None
    mlp_output_norm: NormWeights | None
    query_norm: Tensor | None
    """[D], [Hq, D] or [Hq * D], as ``Attention.qk_norm_over`` says."""
    key_norm: Tensor | None
    """As ``query_norm``, with Hkv."""
    sinks: Tensor | None = None
    """[Hq]."""


class DecoderWeights(msgspec.Struct):
    embedding: Tensor
    """[vocab, hidden]."""
    layers: list[LayerWeights]
    norm: NormWeights
    lm_head: Linear
    """Its weight is the embedding itself when tied."""
    names: TensorNames
    """Of the checkpoint that they are read from."""
    first_layer: int = 0
    """Number of the first of ``layers`` there."""


def allocate_weights(
    model: ModelSpecification,
    dtype: torch.dtype,
    device: torch.device,
    names: TensorNames = LLAMA_NAMES,
    quantization: Quantization | None = None,
    ranks: RankGroup | None = None,
) -> DecoderWeights:
    """Uninitialized weights. On the meta device they cost nothing and tell the shapes. names: of
    the checkpoint; quantization: of its linear layers, those of which have no weights yet; ranks:
    those among whom the model is divided, if it is.

    An LM head that is the embedding is quantized where weights are while they are read: it is a
    second form of it then.
    """
    memory = _Memory(model.hidden_size, dtype, device, ranks)
    table = memory.empty(model.table_rows, model.hidden_size)
    all_linears = model_linears(model, names, quantization)
    layers = [memory.layer(*each) for each in zip(model.layers, all_linears.layers, strict=True)]
    head, tied = all_linears.head, model.tie_word_embeddings
    lm_head = Linear(head, table) if tied and not head.formats else memory.linear(head)
    if ranks is not None and head.formats:
        lm_head = VocabularyQuantizedLinear(head, dtype, device)
    elif ranks is not None:
        lm_head = VocabularyLinear(head, lm_head.weight)
    norm = memory.norm(model.norm)
    return DecoderWeights(table, layers, norm, lm_head, names, model.first_layer)


def named_tensors(weights: DecoderWeights) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by its name, as a view of the (fused) weights."""
    names = weights.names
    named = {f"{names.embedding}.weight": weights.embedding} | _named_norm(names.norm, weights.norm)
    if weights.lm_head.weight is not weights.embedding:
        named |= weights.lm_head.named()
    for index, layer in enumerate(weights.layers, weights.first_layer):
        prefix = names.layer.format(index)
        named |= {prefix + name: each for name, each in _named_layer(names, layer).items()}
    return named


def _named_layer(names: TensorNames, layer: LayerWeights) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for linear in layer.linears:
        named |= linear.named()
    for name, norm in (
        (names.input_norm, layer.input_norm),
        (names.mlp_norm, layer.mlp_norm),
        (names.attention_output_norm, layer.attention_output_norm),
        (names.mlp_output_norm, layer.mlp_output_norm),
    ):
        named |= _named_norm(name, norm)
    for name, tensor in ((names.query_norm, layer.query_norm), (names.key_norm, layer.key_norm)):
        if tensor is not None:
            named[f"{name}.weight"] = tensor
    if layer.sinks is not None:
        named[names.sinks] = layer.sinks
    return named


def _named_norm(name: str, norm: NormWeights | None) -> dict[str, Tensor]:
    if norm is None:
        return {}
    named = {f"{name}.weight": norm.weight}
    return named if norm.bias is None else named | {f"{name}.bias": norm.bias}


class _Memory:
    def __init__(
        self, hidden: int, dtype: torch.dtype, device: torch.device, ranks: RankGroup | None
    ) -> None:
        self._hidden, self._dtype, self._device, self._ranks = hidden, dtype, device, ranks

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self._dtype, device=self._device)

    def linear(self, specification: LinearSpecification) -> Linear:
        dtype, device, summed = self._dtype, self._device, specification.shard == "inputs"
        if specification.formats and self._ranks is not None and summed:
            return SummedQuantizedLinear(specification, dtype, device, self._ranks)
        if specification.formats:
            return QuantizedLinear(specification, dtype, device)
        linear = Linear.allocate(specification, dtype, device)
        if self._ranks is not None and summed:
            return SummedLinear(specification, linear.weight, linear.bias, self._ranks)
        return linear

    def layer(self, layer: Layer, linears: LayerLinears[LinearSpecification]) -> LayerWeights:
        attention = layer.attention
        norms = self._query_key_norms(attention)
        return LayerWeights(
            linears=LayerLinears(*map(self.linear, linears)),
            input_norm=self._optional_norm(layer.input_norm),
            mlp_norm=self._optional_norm(layer.mlp_norm),
            attention_output_norm=self._optional_norm(layer.attention_output_norm),
            mlp_output_norm=self._optional_norm(layer.mlp_output_norm),
            query_norm=norms[0],
            key_norm=norms[1],
            sinks=self.empty(attention.num_heads) if attention.sinks else None,
        )

    def norm(self, norm: Norm) -> NormWeights:
        bias = self.empty(self._hidden) if norm.bias else None
        return NormWeights(self.empty(self._hidden), bias)

    def _optional_norm(self, norm: Norm | None) -> NormWeights | None:
        return None if norm is None else self.norm(norm)

    def _query_key_norms(self, attention: Attention) -> tuple[Tensor | None, Tensor | None]:
        if attention.qk_norm is None:
            return None, None
        dim, heads, kv_heads = attention.head_dim, attention.num_heads, attention.num_kv_heads
        match attention.qk_norm_over:
            case "head":
                return self.empty(dim), self.empty(dim)
            case "each":
                return self.empty(heads, dim), self.empty(kv_heads, dim)
            case "all":
                return self.empty(heads * dim), self.empty(kv_heads * dim)


def in_halves(model: ModelSpecification, weights: DecoderWeights) -> ModelSpecification:
    """Reorder queries and keys that are rotated in neighbouring pairs, so that element i and
    element i + dim / 2 are a pair; returns the model that these weights are then of.

    The scores stay: queries and keys are reordered alike.
    """
    layers = []
    for layer, part in zip(model.layers, weights.layers, strict=True):
        attention, rotary = layer.attention, layer.attention.rotary
        if rotary is not None and rotary.interleaved:
            order, dim = torch.arange(attention.head_dim), rotary.dim
            order[:dim] = order[:dim].view(-1, 2).t().reshape(-1)
            reorder_heads(attention, order, part)
            halves = replace(rotary, interleaved=False)
            layer = replace(layer, attention=replace(attention, rotary=halves))
        layers.append(layer)
    return replace(model, layers=tuple(layers))


def reorder_heads(attention: Attention, order: Tensor, weights: LayerWeights) -> None:
    """Let the elements of each query and key head be those of these numbers, [D], in this order."""
    dim, heads = attention.head_dim, attention.num_heads + attention.num_kv_heads
    first = torch.arange(0, heads * dim, dim, device=order.device)
    weights.linears.qkv.reorder((first[:, None] + order).view(-1))
    for norm in (weights.query_norm, weights.key_norm):
        if norm is not None:
            norm.copy_(norm.view(-1, dim)[:, order.to(norm.device)].view(norm.shape))
