"""What a decoder is made of, as data: one specification for each layer, and what stands around.

An adapter writes these from ``config.json``; what computes a model reads nothing else. Layers with
equal specifications are computed alike, so kernels are chosen for each distinct one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from penstock.kernels.block_pattern import NO_BLOCKS, BlockPattern
from penstock.kernels.rope_parameters import RopeParameters
from penstock.protocol.wire.messages.engine import (
    CHUNK_ATTENTION,
    WINDOW_ATTENTION,
    LayerGroup,
)


class Norm(msgspec.Struct, frozen=True):
    """A normalization of each row."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    """``layer`` subtracts the mean first."""
    plus_one: bool = False
    """Whether a row is multiplied by 1 + weight instead of weight."""
    bias: bool = False


class Rotary(msgspec.Struct, frozen=True):
    """Rotary embedding of queries and keys."""

    parameters: RopeParameters
    dim: int
    """How many elements of each head are rotated, from the first on."""
    interleaved: bool = False
    """Whether elements 2i and 2i + 1 are a pair, instead of i and i + dim / 2."""


class Attention(msgspec.Struct, frozen=True):
    """Self-attention with grouped queries."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """What scores are multiplied by."""
    rotary: Rotary | None
    """``None``: positions are told by the mask alone."""
    window: int = 0
    """Positions that each one attends to, its own included; 0: all before it."""
    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap); 0: they stay."""
    qk_norm: Norm | None = None
    """Of queries and of keys, ahead of the rotary embedding."""
    qk_norm_over: Literal["head", "each", "all"] = "head"
    """``head``: each head alone, all with one weight [D]. ``each``: with a weight of its own,
    [H, D]. ``all``: all heads together, [H * D]."""
    qkv_bias: bool = False
    output_bias: bool = False
    chunk: int = 0
    """Positions of a chunk: each one attends to those of its own chunk alone; 0: no chunks."""
    besides: BlockPattern = NO_BLOCKS
    """Blocks that each position attends to besides its window or chunk."""
    sinks: bool = False
    """Whether the softmax of each head has one more score, a weight, which stands for no value."""


class Experts(msgspec.Struct, frozen=True):
    """Several MLPs of one shape, of which each row is computed by those that score highest.

    An adapter may say so; nothing of Penstock's own computes it yet, and ``own_specification``
    refuses the model by name. What it will take: a router [count, hidden] for each layer, weights
    of ``Mlp.width`` for each expert, and for ranks a division by experts."""

    count: int
    chosen: int
    """Experts that compute a row."""


class Mlp(msgspec.Struct, frozen=True):
    """The feed-forward part: down(activation(gate(x)) * up(x)), or down(activation(up(x)))."""

    width: int
    activation: str = "silu"
    """A key of ``kernels.activation.ACTIVATIONS``."""
    gated: bool = True
    up_bias: bool = False
    """Of gate and up."""
    down_bias: bool = False
    experts: Experts | None = None
    """``None``: dense; else the rest is that of one expert."""


class Layer(msgspec.Struct, frozen=True):
    """Attention and MLP, each added to the residual stream. A norm that is ``None`` is left out."""

    attention: Attention
    mlp: Mlp
    input_norm: Norm | None
    """Ahead of attention."""
    mlp_norm: Norm | None
    """Ahead of the MLP."""
    attention_output_norm: Norm | None = None
    """Of what attention adds."""
    mlp_output_norm: Norm | None = None
    """Of what the MLP adds."""
    parallel: bool = False
    """Whether the MLP reads what attention reads, the rows behind ``input_norm``."""
    residual_multiplier: float = 1.0
    """What is added to the residual stream is multiplied by this first."""


class ModelSpecification(msgspec.Struct, frozen=True):
    """A causal language model: embedding, layers, norm, LM head."""

    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    norm: Norm
    """Ahead of the LM head."""
    tie_word_embeddings: bool
    embedding_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_softcap: float = 0.0
    """Logits become softcap * tanh(logit / softcap), behind the multiplier; 0: they stay."""
    embeds: bool = True
    """Whether it begins with the embedding; else with rows of an earlier stage."""
    predicts: bool = True
    """Whether it ends with norm and LM head; else a later stage does."""
    first_layer: int = 0
    """Number of its first layer in the checkpoint."""
    multiplies_inputs: bool = False
    """Whether ``embedding_multiplier`` stands behind the embedding, so that it is also of rows that
    do not come out of it."""

    @property
    def table_rows(self) -> int:
        """Rows of the embedding's table, which is the LM head's too where they are tied."""
        used = self.embeds or (self.predicts and self.tie_word_embeddings)
        return self.vocab_size if used else 0

    @property
    def head_rows(self) -> int:
        """Rows of an LM head of its own."""
        return self.vocab_size if self.predicts and not self.tie_word_embeddings else 0


def for_length(model: ModelSpecification, longest: int) -> ModelSpecification:
    """The model for sequences of up to so many positions: with one set of LongRoPE's factors."""

    def chosen(layer: Layer) -> Layer:
        rotary = layer.attention.rotary
        if rotary is None or rotary.parameters.rope_type != "longrope":
            return layer
        replace = msgspec.structs.replace
        of_length = replace(rotary, parameters=rotary.parameters.for_length(longest))
        return replace(layer, attention=replace(layer.attention, rotary=of_length))

    return msgspec.structs.replace(model, layers=tuple(chosen(each) for each in model.layers))


class CacheSpecification(msgspec.Struct, frozen=True):
    """What a layer keeps of each position: keys and values of ``num_kv_heads`` heads."""

    num_kv_heads: int
    head_dim: int
    num_heads: int
    """Query heads that read it."""
    window: int = 0
    softcap: float = 0.0
    """How scores are made from it: see ``Attention``."""
    scale: float = 0.0
    """What scores are multiplied by; 0: 1 / sqrt(head_dim)."""
    sinks: bool = False
    """Whether attention is given sinks: see ``Attention``."""
    chunk: int = 0
    besides: BlockPattern = NO_BLOCKS
    """See ``Attention``."""

    @property
    def score_scale(self) -> float:
        return self.scale or self.head_dim**-0.5

    @property
    def plain(self) -> bool:
        """Whether each position attends to all before it, with scores that are only scaled."""
        return not (self.window or self.chunk or self.softcap or self.sinks)

    @property
    def group(self) -> LayerGroup:
        """The kind of the group of layers that it belongs to: what it keeps of a sequence."""
        if any(self.besides):
            return LayerGroup()
        if self.window:
            return LayerGroup(WINDOW_ATTENTION, self.window)
        return LayerGroup(CHUNK_ATTENTION, self.chunk) if self.chunk else LayerGroup()


def cache_of(layer: Layer) -> CacheSpecification:
    part = layer.attention
    return CacheSpecification(
        part.num_kv_heads, part.head_dim, part.num_heads, part.window, part.softcap, part.scale,
        part.sinks, part.chunk, part.besides,
    )  # fmt: skip


def head_shape(caches: Sequence[CacheSpecification]) -> tuple[int, int, int]:
    """Query heads, KV heads and head size of layers that all have the same.

    Raises ``ValueError`` where they do not.
    """
    shapes = {(cache.num_heads, cache.num_kv_heads, cache.head_dim) for cache in caches}
    if len(shapes) != 1:
        raise ValueError(f"layers with heads of {len(shapes)} shapes")
    return shapes.pop()
