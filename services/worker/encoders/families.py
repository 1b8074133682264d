"""The families of encoders: what their ``config.json`` means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.protocol.model_info import BadModelFolder, ModelInfo
from penstock.services.worker.encoders.specification import (
    EncoderNames,
    EncoderSpecification,
    HeadLayer,
    LayerKind,
)

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
_OUT_PROJ = (
    HeadLayer("classifier.dense", activation="tanh"),
    HeadLayer("classifier.out_proj", is_last=True),
)


class _Config:
    """Typed access to ``config.json``. All methods raise ``BadModelFolder``."""

    def __init__(self, info: ModelInfo) -> None:
        self._config = info.config
        self._path = info.folder / "config.json"
        self.vocab_size = info.vocab_size

    def error(self, text: str) -> BadModelFolder:
        return BadModelFolder(f"{self._path}: {text}")

    def get(self, key: str, default: Any = None) -> Any:
        found = self._config.get(key)
        return default if found is None else found

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if type(value) is not int or not 0 < value < 2**24:
            raise self.error(f"{key} must be a positive integer, got {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.error(f"{key} must be a positive number, got {value!r}")
        return float(value)

    def activation(self, key: str) -> str:
        name = self.get(key, "gelu")
        if name not in _ACTIVATIONS:
            raise self.error(f"{key} {name!r}; supported are {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]

    def only(self, key: str, default: Any) -> None:
        """Refuse a setting that changes what the model computes and is not implemented."""
        if (value := self.get(key, default)) != default:
            raise self.error(f"{key} is {value!r}; supported is {default!r}")


def _bert_like(info: ModelInfo, names: EncoderNames, **more: Any) -> EncoderSpecification:
    config = _Config(info)
    config.only("position_embedding_type", "absolute")
    config.only("is_decoder", False)
    return EncoderSpecification(
        vocab_size=config.vocab_size,
        hidden_size=config.integer("hidden_size", 768),
        num_heads=config.integer("num_attention_heads", 12),
        mlp_width=config.integer("intermediate_size", 3072),
        layers=(LayerKind(),) * config.integer("num_hidden_layers", 12),
        names=names,
        eps=config.number("layer_norm_eps", 1e-12),
        activation=config.activation("hidden_act"),
        positions=config.integer("max_position_embeddings", 512),
        **more,
    )


def _bert(info: ModelInfo) -> EncoderSpecification:
    names = EncoderNames("bert.", segments="embeddings.token_type_embeddings")
    head = (
        HeadLayer("pooler.dense", activation="tanh", within_base=True),
        HeadLayer("classifier", is_last=True),
    )
    segments = _Config(info).integer("type_vocab_size", 2)
    return _bert_like(info, names, head=head, segments=segments)


def _roberta(info: ModelInfo) -> EncoderSpecification:
    names = EncoderNames("roberta.", segments="embeddings.token_type_embeddings")
    config = _Config(info)
    first = int(config.get("pad_token_id", 1)) + 1
    segments = config.integer("type_vocab_size", 2)
    return _bert_like(info, names, head=_OUT_PROJ, segments=segments, first_position=first)


def _mpnet(info: ModelInfo) -> EncoderSpecification:
    names = EncoderNames(
        "mpnet.",
        relative="encoder.relative_attention_bias",
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        output="attention.attn.o",
        attention_norm="attention.LayerNorm",
    )
    buckets = _Config(info).integer("relative_attention_num_buckets", 32)
    return _bert_like(info, names, head=_OUT_PROJ, first_position=2, relative_buckets=buckets)


def _distilbert(info: ModelInfo) -> EncoderSpecification:
    config = _Config(info)
    names = EncoderNames(
        "distilbert.",
        layer="transformer.layer.{}.",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        output="attention.out_lin",
        attention_norm="sa_layer_norm",
        up="ffn.lin1",
        down="ffn.lin2",
        mlp_norm="output_layer_norm",
    )
    head = (
        HeadLayer("pre_classifier", activation="relu"),
        HeadLayer("classifier", is_last=True),
    )
    return EncoderSpecification(
        vocab_size=config.vocab_size,
        hidden_size=config.integer("dim", 768),
        num_heads=config.integer("n_heads", 12),
        mlp_width=config.integer("hidden_dim", 3072),
        layers=(LayerKind(),) * config.integer("n_layers", 6),
        names=names,
        head=head,
        eps=1e-12,
        activation=config.activation("activation"),
        positions=config.integer("max_position_embeddings", 512),
    )


def _modernbert(info: ModelInfo) -> EncoderSpecification:
    config = _Config(info)
    names = EncoderNames(
        "model.",
        words="embeddings.tok_embeddings",
        positions="",
        embedding_norm="embeddings.norm",
        final_norm="final_norm",
        layer="layers.{}.",
        qkv=("attn.Wqkv",),
        output="attn.Wo",
        attention_norm="attn_norm",
        up="mlp.Wi",
        down="mlp.Wo",
        mlp_norm="mlp_norm",
    )
    activation = config.get("classifier_activation", "gelu")
    if activation not in ("gelu", "relu", "tanh"):
        raise config.error(f"classifier_activation {activation!r}; supported are gelu, relu, tanh")
    norm_bias = config.get("norm_bias", False) is True
    head = (
        HeadLayer(
            "head.dense",
            activation=activation,
            bias=config.get("classifier_bias", False) is True,
        ),
        HeadLayer("head.norm", kind="norm", bias=norm_bias),
        HeadLayer("classifier", is_last=True),
    )
    return EncoderSpecification(
        vocab_size=config.vocab_size,
        hidden_size=config.integer("hidden_size", 768),
        num_heads=config.integer("num_attention_heads", 12),
        mlp_width=config.integer("intermediate_size", 1152),
        layers=_alternating(config),
        names=names,
        head=head,
        eps=config.number("norm_eps", 1e-5),
        activation=config.activation("hidden_activation"),
        pre_norm=True,
        gated=True,
        attention_bias=config.get("attention_bias", False) is True,
        mlp_bias=config.get("mlp_bias", False) is True,
        norm_bias=norm_bias,
    )


def _alternating(config: _Config) -> tuple[LayerKind, ...]:
    """ModernBERT's layers: every third one attends to all positions, the others to a window."""
    count = config.integer("num_hidden_layers", 22)
    every = config.integer("global_attn_every_n_layers", 3)
    default = ["sliding_attention" if n % every else "full_attention" for n in range(count)]
    kinds, ropes = config.get("layer_types", default), config.get("rope_parameters", {})
    if not isinstance(kinds, list) or len(kinds) != count or not isinstance(ropes, dict):
        raise config.error(f"layer_types must be a list of {count} names")
    window = config.integer("local_attention", 128) // 2
    thetas = {
        "full_attention": config.number("global_rope_theta", 160_000.0),
        "sliding_attention": config.number("local_rope_theta", 10_000.0),
    }
    found = []
    for kind in kinds:
        if kind not in thetas:
            raise config.error(f"layer_types: {kind!r}; supported are {', '.join(thetas)}")
        rope = ropes.get(kind) or {}
        if rope.get("rope_type", "default") != "default":
            raise config.error(f"rope_type {rope['rope_type']!r}; supported is 'default'")
        theta = float(rope.get("rope_theta", thetas[kind]))
        found.append(LayerKind(window if kind == "sliding_attention" else 0, theta))
    return tuple(found)


_FAMILIES: dict[str, Callable[[ModelInfo], EncoderSpecification]] = {
    "Bert": _bert,
    "Roberta": _roberta,
    "XLMRoberta": _roberta,
    "Camembert": _roberta,
    "MPNet": _mpnet,
    "DistilBert": _distilbert,
    "ModernBert": _modernbert,
}


def encoder_specification(info: ModelInfo) -> EncoderSpecification:
    """Raises ``BadModelFolder`` for an architecture or a setting that is not implemented."""
    for suffix in ("ForSequenceClassification", "ForMaskedLM", "Model"):
        make = _FAMILIES.get(info.architecture.removesuffix(suffix))
        if make is not None:
            found = make(info)
            if found.hidden_size % found.num_heads:
                raise BadModelFolder(
                    f"{info.folder / 'config.json'}: {found.hidden_size} hidden numbers are no "
                    f"multiple of {found.num_heads} heads"
                )
            return found
    raise BadModelFolder(
        f"{info.folder / 'config.json'}: no encoder has the architecture {info.architecture!r}; "
        f"supported are {', '.join(_FAMILIES)}"
    )
