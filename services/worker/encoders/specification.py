"""What an encoder is made of, as data, and what its checkpoint calls its weights."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.services.worker.models.linear_specification import (
    LayerLinears,
    LinearSpecification,
)


class LayerKind(msgspec.Struct, frozen=True):
    """How a layer attends."""

    window: int = 0
    """Each position attends to so many on either side; 0: to all."""
    theta: float = 0.0
    """Base of the rotary embedding; 0: none."""


class EncoderNames(msgspec.Struct, frozen=True):
    """Names of a family's tensors, without ``base`` and the suffixes; empty: it has none."""

    base: str
    """Ahead of all names but those of heads, in folders that were saved with a head."""
    words: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    segments: str = ""
    relative: str = ""
    embedding_norm: str = "embeddings.LayerNorm"
    final_norm: str = ""
    layer: str = "encoder.layer.{}."
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    """Stored as three, or as one."""
    output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"


class HeadLayer(msgspec.Struct, frozen=True):
    """One layer between a pooled state and logits."""

    name: str
    kind: Literal["dense", "norm"] = "dense"
    activation: str = ""
    """``tanh``, ``relu`` or ``gelu``."""
    bias: bool = True
    is_last: bool = False
    """Its outputs are the logits."""
    within_base: bool = False
    """Its name has the model's base ahead of it."""

    def linear(self, hidden: int, labels: int) -> LinearSpecification:
        """If it is dense."""
        outputs = labels if self.is_last else hidden
        return LinearSpecification(hidden, (outputs,), (self.name,), self.bias)


class EncoderSpecification(msgspec.Struct, frozen=True, kw_only=True):
    """An encoder, without what is pooled behind it."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    mlp_width: int
    layers: tuple[LayerKind, ...]
    names: EncoderNames
    head: tuple[HeadLayer, ...]
    """Of a classifier."""
    eps: float
    activation: str = "gelu"
    """A key of ``kernels.activation.ACTIVATIONS``."""
    positions: int = 0
    """Rows of the table of positions; 0: there is none."""
    first_position: int = 0
    """The row of a prompt's first position."""
    segments: int = 0
    """Rows of the table of segments; 0: there is none."""
    relative_buckets: int = 0
    """Rows of the table of relative positions, as T5 has them; 0: there is none."""
    pre_norm: bool = False
    """Norms stand ahead of attention and MLP (the first layer has none ahead of attention), and one
    behind the last layer; else behind what is added."""
    gated: bool = False
    attention_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def linears(self) -> LayerLinears[LinearSpecification]:
        """Of each layer."""
        hidden, width, names = self.hidden_size, self.mlp_width, self.names
        ups = (width,) * (2 if self.gated else 1)
        return LayerLinears(
            LinearSpecification(hidden, (hidden,) * 3, names.qkv, self.attention_bias),
            LinearSpecification(
                hidden, (hidden,), (names.output,), self.attention_bias, shard="inputs"
            ),
            LinearSpecification(hidden, ups, (names.up,), self.mlp_bias, self.gated),
            LinearSpecification(width, (hidden,), (names.down,), self.mlp_bias, shard="inputs"),
        )
