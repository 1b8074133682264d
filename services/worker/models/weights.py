"""The weights of a decoder: memory for what a specification has, and nothing else."""

from __future__ import annotations

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from penstock.services.worker.models.specification import (
    Attention,
    Layer,
    ModelSpecification,
    Norm,
    attention_widths,
    up_width,
)


class LinearWeights(msgspec.Struct):
    weight: Tensor
    """[out, in]."""
    bias: Tensor | None = None
    """[out]."""


class NormWeights(msgspec.Struct):
    weight: Tensor
    bias: Tensor | None = None


class LayerWeights(msgspec.Struct):
    """One layer; what its specification leaves out is ``None``."""

    qkv: LinearWeights
    """[(Hq + 2 Hkv) * D, hidden]: queries, keys, values."""
    output: LinearWeights
    """[hidden, Hq * D]."""
    up: LinearWeights
    """[2 * width, hidden]: gate, then up; [width, hidden] if not gated."""
    down: LinearWeights
    """[hidden, width]."""
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
    lm_head: Tensor
    """[vocab, hidden]; the embedding itself when tied."""


def allocate_weights(
    model: ModelSpecification, dtype: torch.dtype, device: torch.device
) -> DecoderWeights:
    """Uninitialized weights. On the meta device they cost nothing and tell the shapes."""
    memory = _Memory(model.hidden_size, dtype, device)
    table = memory.empty(model.vocab_size, model.hidden_size)
    layers = [memory.layer(layer) for layer in model.layers]
    tied = model.tie_word_embeddings
    head = table if tied else memory.empty(model.vocab_size, model.hidden_size)
    return DecoderWeights(table, layers, memory.norm(model.norm), head)


class _Memory:
    def __init__(self, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self._hidden, self._dtype, self._device = hidden, dtype, device

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self._dtype, device=self._device)

    def layer(self, layer: Layer) -> LayerWeights:
        attention, mlp, hidden = layer.attention, layer.mlp, self._hidden
        queries, keys = attention_widths(attention)
        up = up_width(mlp)
        norms = self._query_key_norms(attention)
        return LayerWeights(
            qkv=self._linear(queries + 2 * keys, hidden, attention.qkv_bias),
            output=self._linear(hidden, queries, attention.output_bias),
            up=self._linear(up, hidden, mlp.up_bias),
            down=self._linear(hidden, mlp.width, mlp.down_bias),
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

    def _linear(self, out: int, width: int, bias: bool) -> LinearWeights:
        return LinearWeights(self.empty(out, width), self.empty(out) if bias else None)

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
            _reorder(attention, rotary.dim, part)
            halves = replace(rotary, interleaved=False)
            layer = replace(layer, attention=replace(attention, rotary=halves))
        layers.append(layer)
    return replace(model, layers=tuple(layers))


def _reorder(attention: Attention, rotated: int, weights: LayerWeights) -> None:
    dim, heads = attention.head_dim, attention.num_heads + attention.num_kv_heads
    device = weights.qkv.weight.device
    within = torch.arange(dim, device=device)
    within[:rotated] = within[:rotated].view(-1, 2).t().reshape(-1)
    rows = (torch.arange(heads, device=device)[:, None] * dim + within).view(-1)
    for tensor in (weights.qkv.weight, weights.qkv.bias):
        if tensor is not None:
            tensor[: heads * dim] = tensor[: heads * dim].index_select(0, rows)
    for norm in (weights.query_norm, weights.key_norm):
        if norm is not None:
            norm.copy_(norm.view(-1, dim)[:, within].view(norm.shape))
