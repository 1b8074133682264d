"""``ModelAdapter``: what a model family adds: its specification, and the names of its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from penstock.protocol.model_info import ModelInfo
from penstock.services.worker.models.specification import ModelSpecification


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


LLAMA_NAMES = TensorNames()


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


def may_be_zero(
    names: TensorNames, model: ModelSpecification, *, divided: bool = False
) -> Callable[[str], bool]:
    """Tells of a name whether sound checkpoints hold that tensor as zeros: biases of models trained
    without; what writes into the residual stream, in blocks that were added to a model and not yet
    trained; norms that multiply by 1 + weight; sinks, which begin there. divided: of the rows of a
    vocabulary only some are read, which may be those that no token has."""
    suffixes = [".bias", f"{names.output}.weight", f"{names.down}.weight", names.sinks]
    if divided:
        suffixes += [f"{names.embedding}.weight", f"{names.lm_head}.weight"]
    if model.norm.plus_one:
        suffixes.append("norm.weight")
    return lambda name: name.endswith(tuple(suffixes))
