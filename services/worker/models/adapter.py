"""``ModelAdapter``: what a model family adds to the shared decoder."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from penstock.protocol.model_info import ModelInfo
from penstock.services.worker.models.config_reader import ConfigReader
from penstock.services.worker.models.decoder import DecoderConfig, DecoderWeights, LayerWeights


class ModelAdapter(Protocol):
    """One model family: maps its config and its weight names onto the decoder."""

    architecture: str
    """The ``architectures`` entry of ``config.json`` that it serves."""

    def decoder_config(self, info: ModelInfo) -> DecoderConfig:
        """Raises ``BadModelFolder`` for a feature that is not implemented."""

    def named_tensors(self, config: DecoderConfig, weights: DecoderWeights) -> dict[str, Tensor]:
        """Every tensor of the checkpoint by name, as a view of the (fused) weights."""


def dense_config(
    info: ModelInfo,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    head_dim: int | None = None,
) -> DecoderConfig:
    """The keys that Llama-like configs share. Raises ``BadModelFolder``.

    ``head_dim``: the family's own default; ``None``: hidden_size / num_attention_heads.
    """
    reader = ConfigReader(info)
    reader.refuse_unsupported()
    layers = reader.integer("num_hidden_layers")
    reader.refuse_sliding_window(layers)
    hidden = reader.integer("hidden_size")
    heads = reader.integer("num_attention_heads")
    kv_heads = reader.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise reader.error(
            f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    dim = reader.integer("head_dim", head_dim or max(1, hidden // heads))
    if dim % 2:
        raise reader.error(f"head_dim {dim} is odd: rotary embedding needs pairs")
    return DecoderConfig(
        vocab_size=info.vocab_size,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        intermediate_size=reader.integer("intermediate_size"),
        rms_norm_eps=reader.positive("rms_norm_eps", 1e-6),
        rope=reader.rope(),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )


def dense_tensors(config: DecoderConfig, weights: DecoderWeights) -> dict[str, Tensor]:
    """The names that Llama-like checkpoints share."""
    named = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm}
    if not config.tie_word_embeddings:
        named["lm_head.weight"] = weights.lm_head
    for index, layer in enumerate(weights.layers):
        for name, tensor in _layer_tensors(config, layer).items():
            named[f"model.layers.{index}.{name}"] = tensor
    return named


def _layer_tensors(config: DecoderConfig, layer: LayerWeights) -> dict[str, Tensor]:
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    named: dict[str, Tensor | None] = {
        "input_layernorm.weight": layer.input_norm,
        "post_attention_layernorm.weight": layer.post_norm,
        "self_attn.q_norm.weight": layer.query_norm,
        "self_attn.k_norm.weight": layer.key_norm,
        "self_attn.o_proj.weight": layer.output,
        "self_attn.o_proj.bias": layer.output_bias,
        "mlp.down_proj.weight": layer.down,
        "mlp.down_proj.bias": layer.down_bias,
    }
    for kind, qkv, gate_up in (
        ("weight", layer.qkv, layer.gate_up),
        ("bias", layer.qkv_bias, layer.gate_up_bias),
    ):
        if qkv is not None:
            parts = torch.split(qkv, [queries, keys, keys])
            for letter, part in zip("qkv", parts, strict=True):
                named[f"self_attn.{letter}_proj.{kind}"] = part
        if gate_up is not None:
            gate, up = torch.split(gate_up, [inner, inner])
            named[f"mlp.gate_proj.{kind}"], named[f"mlp.up_proj.{kind}"] = gate, up
    return {name: tensor for name, tensor in named.items() if tensor is not None}
