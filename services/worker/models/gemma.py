"""Gemma 1, 2 and 3 (text). Norms multiply by 1 + weight, and embeddings by sqrt(hidden size).

Gemma 2 caps scores and logits; Gemma 3 norms query and key heads instead, and its layers with a
window have a rotary embedding of their own. Its ``attn_logit_softcapping`` does nothing, as in
transformers.
"""

from __future__ import annotations

from penstock.protocol.model_info import ModelInfo
from penstock.services.worker.models.adapter import TensorNames
from penstock.services.worker.models.config_reader import ConfigReader
from penstock.services.worker.models.specification import Layer, ModelSpecification, Norm, Rotary

HEAD_DIM = 256
NAMES = TensorNames(
    mlp_norm="pre_feedforward_layernorm",
    attention_output_norm="post_attention_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
)


class GemmaAdapter:
    architectures = ("GemmaForCausalLM",)
    names = TensorNames()

    def specification(self, info: ModelInfo) -> ModelSpecification:
        reader = _reader(info)
        norm, bias = reader.rms_norm(plus_one=True), reader.flag("attention_bias", False)
        attention = reader.attention(
            reader.rotary(head_dim=HEAD_DIM), head_dim=HEAD_DIM, qkv_bias=bias, output_bias=bias
        )
        # The first configs say "gelu" and mean the tanh form.
        activation = reader.activation("hidden_act", "gelu_pytorch_tanh")
        mlp = reader.mlp(activation="gelu_tanh" if activation == "gelu" else activation)
        return _model(reader, [Layer(attention, mlp, norm, norm)] * reader.num_layers, norm)


class Gemma2Adapter:
    architectures = ("Gemma2ForCausalLM",)
    names = NAMES

    def specification(self, info: ModelInfo) -> ModelSpecification:
        reader = _reader(info)
        norm, rotary = reader.rms_norm(plus_one=True), reader.rotary(head_dim=HEAD_DIM)
        softcap = reader.optional("attn_logit_softcapping", 50.0)
        layers = [
            _layer(reader, norm, rotary, window, softcap) for window in reader.windows(2, 4096)
        ]
        return _model(reader, layers, norm, reader.optional("final_logit_softcapping", 30.0))


class Gemma3Adapter:
    architectures = ("Gemma3ForCausalLM",)
    names = NAMES

    def specification(self, info: ModelInfo) -> ModelSpecification:
        reader = _reader(info)
        norm = reader.rms_norm(plus_one=True)
        theta, local_theta = (
            reader.positive("rope_theta", 1e6),
            reader.positive("rope_local_base_freq", 10_000.0),
        )
        rotaries = reader.rotary_of_kinds(theta, local_theta, head_dim=HEAD_DIM)
        pattern = reader.integer("sliding_window_pattern", 6)
        kinds, windows = reader.kinds(pattern), reader.windows(pattern, 4096)
        layers = [
            _layer(reader, norm, rotaries[kind], window, 0.0, norm)
            for kind, window in zip(kinds, windows, strict=True)
        ]
        return _model(reader, layers, norm, reader.optional("final_logit_softcapping", 0.0))


def _reader(info: ModelInfo) -> ConfigReader:
    reader = ConfigReader(info)
    if reader.flag("use_bidirectional_attention", False):
        raise reader.error("use_bidirectional_attention: the model is an encoder")
    return reader


def _layer(
    reader: ConfigReader,
    norm: Norm,
    rotary: Rotary,
    window: int,
    softcap: float,
    qk_norm: Norm | None = None,
) -> Layer:
    """One of Gemma 2 or 3: normed ahead of attention and MLP, and behind them."""
    scale = reader.positive("query_pre_attn_scalar", 256.0) ** -0.5
    bias = reader.flag("attention_bias", False)
    attention = reader.attention(
        rotary, head_dim=HEAD_DIM, scale=scale, window=window, softcap=softcap, qk_norm=qk_norm,
        qkv_bias=bias, output_bias=bias,
    )  # fmt: skip
    mlp = reader.mlp(activation=reader.activation("hidden_activation", "gelu_pytorch_tanh"))
    return Layer(attention, mlp, norm, norm, norm, norm)


def _model(
    reader: ConfigReader, layers: list[Layer], norm: Norm, softcap: float = 0.0
) -> ModelSpecification:
    return reader.model(
        layers, norm, tied=True, embedding_multiplier=reader.hidden_size**0.5, logit_softcap=softcap
    )
