"""The uniform decoder that the kernels of GPUs compute: all layers alike, as in Llama and Qwen.

A layer is: RMSNorm, fused QKV projection, optional norm of each query and key head, rotary
embedding, attention to all positions, output projection, RMSNorm, fused gate and up projection,
SiLU·mul, down projection; each half adds to the residual stream.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from penstock.kernels.rotary import RopeParameters
from penstock.services.worker.models.specification import (
    Attention,
    Layer,
    Mlp,
    ModelSpecification,
    Norm,
    Rotary,
)
from penstock.services.worker.models.weights import DecoderWeights, LayerWeights, allocate_weights


class DenseConfig(msgspec.Struct, frozen=True):
    """Dimensions and options of a uniform decoder."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeParameters
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


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


class DenseWeights(msgspec.Struct):
    embedding: Tensor
    layers: list[DenseLayer]
    norm: Tensor
    lm_head: Tensor
    """[vocab, hidden]; the embedding itself when tied."""


def allocate_dense(config: DenseConfig, dtype: torch.dtype, device: torch.device) -> DenseWeights:
    """Uninitialized weights."""
    return dense_weights(allocate_weights(specification_of(config), dtype, device))


def specification_of(config: DenseConfig) -> ModelSpecification:
    """The model with these dimensions and options."""
    norm = Norm(config.rms_norm_eps)
    attention = Attention(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.head_dim**-0.5,
        Rotary(config.rope, config.head_dim),
        qk_norm=norm if config.qk_norm else None,
        qkv_bias=config.qkv_bias,
        output_bias=config.output_bias,
    )
    mlp = Mlp(config.intermediate_size, up_bias=config.mlp_bias, down_bias=config.mlp_bias)
    layers = (Layer(attention, mlp, norm, norm),) * config.num_layers
    return ModelSpecification(
        config.vocab_size, config.hidden_size, layers, norm, config.tie_word_embeddings
    )


def dense_config(model: ModelSpecification) -> DenseConfig | str:
    """The model as a uniform decoder, or why it is none."""
    layer = model.layers[0]
    attention, mlp = layer.attention, layer.mlp
    if attention.rotary is None:
        return "layers without rotary embedding"
    config = DenseConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_layers=len(model.layers),
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        intermediate_size=mlp.width,
        rms_norm_eps=model.norm.eps,
        rope=attention.rotary.parameters,
        tie_word_embeddings=model.tie_word_embeddings,
        qkv_bias=attention.qkv_bias,
        output_bias=attention.output_bias,
        mlp_bias=mlp.down_bias,
        qk_norm=attention.qk_norm is not None,
    )
    wanted = specification_of(config)
    if model == wanted:
        return config
    return ", ".join(_differences(model, wanted))


def _differences(model: ModelSpecification, wanted: ModelSpecification) -> list[str]:
    """What the kernels lack for this model, in the words of the specifications."""
    found = _changed(model, wanted, ("layers",))
    if len(set(model.layers)) > 1:
        found.append(f"{len(set(model.layers))} kinds of layers")
    for layer in dict.fromkeys(model.layers):
        plain = wanted.layers[0]
        found += _changed(layer, plain, ("attention", "mlp"))
        found += _changed(layer.attention, plain.attention, ())
        found += _changed(layer.mlp, plain.mlp, ())
    return list(dict.fromkeys(found))


def _changed(one: msgspec.Struct, other: msgspec.Struct, but: tuple[str, ...]) -> list[str]:
    """The fields in which two specifications of one kind differ, as words."""
    return [
        name.replace("_", " ")
        for name in one.__struct_fields__
        if name not in but and getattr(one, name) != getattr(other, name)
    ]


def dense_weights(weights: DecoderWeights) -> DenseWeights:
    """The same tensors; for a model that has a ``dense_config``."""
    layers = [_dense_layer(layer) for layer in weights.layers]
    return DenseWeights(weights.embedding, layers, weights.norm.weight, weights.lm_head)


def _dense_layer(layer: LayerWeights) -> DenseLayer:
    if layer.input_norm is None or layer.mlp_norm is None:
        raise ValueError("a layer of a uniform decoder has a norm ahead of each half")
    return DenseLayer(
        input_norm=layer.input_norm.weight,
        qkv=layer.qkv.weight,
        qkv_bias=layer.qkv.bias,
        query_norm=layer.query_norm,
        key_norm=layer.key_norm,
        output=layer.output.weight,
        output_bias=layer.output.bias,
        post_norm=layer.mlp_norm.weight,
        gate_up=layer.up.weight,
        gate_up_bias=layer.up.bias,
        down=layer.down.weight,
        down_bias=layer.down.bias,
    )
