"""What the memory of a model depends on, read from its folder without torch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.model_info import BadModelFolder, ModelInfo
from penstock.protocol.pooling import read_pooling
from penstock.services.worker.checkpoint import Checkpoint
from penstock.services.worker.model_choice import choose_model
from penstock.services.worker.models.dense import DenseConfig, dense_config, specification_of
from penstock.services.worker.models.linear_specification import model_linears
from penstock.services.worker.models.rank_shares import own_model
from penstock.services.worker.models.registry import adapter_for, is_native, own_specification
from penstock.services.worker.models.sizes import (
    WeightSize,
    fp32_norms,
    num_parameters,
    quantized_size,
)
from penstock.services.worker.models.specification import (
    CacheSpecification,
    ModelSpecification,
    cache_of,
)
from penstock.services.worker.models.stored_form import as_stored
from penstock.services.worker.quantization.reading import read_quantization
from penstock.services.worker.rank_choice import check_division, rank_place

BY_TRANSFORMERS = "computed by transformers' modelling code"
_REPEATED = ("JetMoeForCausalLM",)
"""Whose code repeats keys and values for all heads, ahead of attention."""


class QuantizedShape(msgspec.Struct, frozen=True):
    """Weights of a quantized model."""

    title: str
    cpu: WeightSize
    gpu: WeightSize
    coded_head: bool = False
    """Whether the LM head is quantized."""


class ModelShape(msgspec.Struct, frozen=True):
    """A model as its memory sees it."""

    parameters: int
    head_parameters: int
    """Of the LM head, if it is the embedding too; else 0."""
    table_parameters: int
    """Of the embedding, if it is nothing else; else 0. A step reads a few rows of it."""
    hidden: int
    mlp_width: int
    """Of the widest MLP, gate and up together."""
    vocab: int
    caches: list[CacheSpecification]
    rotary_width: int
    """Numbers of all distinct tables of cosines and sines, for one position."""
    dense: DenseConfig | str
    """What the kernels of GPUs compute, or what they lack for it."""
    dense_parameters: int = 0
    """Numbers of the weights in that form, with heads filled up ..."""
    fp32_norms: int = 0
    """... and of those of them that are fp32 whatever the model's type."""
    adapter_width: int = 0
    """Numbers that an adapter of rank 1 has in that form."""
    quantized: QuantizedShape | None = None
    estimated: bool = False
    """Whether heads and windows are taken from the usual names in ``config.json``, of a model that
    only the code of others knows."""

    @property
    def heads_width(self) -> int:
        """Queries, keys and values of a row in the widest layer."""
        return max((c.num_heads + 2 * c.num_kv_heads) * c.head_dim for c in self.caches)

    @property
    def kv_width(self) -> int:
        """Keys of a position in the widest layer."""
        return max(c.num_kv_heads * c.head_dim for c in self.caches)


def read_shape(info: ModelInfo, config: Config) -> ModelShape:
    """Of what this rank has of the model. Raises ``BadModelFolder`` and ``ConfigError``."""
    if read_pooling(info, config.model).encoder:
        raise BadModelFolder(
            f"{info.folder}: {info.architecture} is an encoder, which keeps no keys and values: "
            "there is no KV memory to plan"
        )
    check_division(config, info)
    model = choose_model(info, config).specification
    if model is not None:
        stored = _stored(info, config, model)
        own = own_model(stored, rank_place(config, info))
        return msgspec.structs.replace(shape_of(own), quantized=_quantized(info, config, own))
    if (model := _known(info)) is not None:
        shape = shape_of(_stored(info, config, model))
        return msgspec.structs.replace(shape, dense=BY_TRANSFORMERS)
    if config.loading.load_format == "dummy":
        raise ConfigError(
            f"--load-format dummy: the memory of a {info.architecture} is told by its files alone; "
            "give a folder with weights"
        )
    shapes = Checkpoint(info.folder).shapes()
    sinks = any(name.endswith(".sinks") for name in shapes)
    return shape_of_others(info, sum(map(math.prod, shapes.values())), sinks=sinks)


def _quantized(info: ModelInfo, config: Config, model: ModelSpecification) -> QuantizedShape | None:
    quantization = read_quantization(info, config.model.quantization)
    if quantization is None:
        return None
    names = adapter_for(info).names
    linears = model_linears(model, names, quantization)
    cpu, gpu = (
        quantized_size(model, quantization, on_cpu=on_cpu, names=names) for on_cpu in (True, False)
    )
    return QuantizedShape(quantization.title, cpu, gpu, bool(linears.head.formats))


def _known(info: ModelInfo) -> ModelSpecification | None:
    """What a family of our own says of a model that transformers' code computes."""
    if is_native(info):
        with contextlib.suppress(BadModelFolder):
            return own_specification(info)
    return None


def _stored(info: ModelInfo, config: Config, model: ModelSpecification) -> ModelSpecification:
    """The model as its files have it, if it has any; what is wrong with them is told by who loads
    them."""
    adapter = adapter_for(info)
    if config.loading.load_format == "dummy":
        return model
    with contextlib.suppress(BadModelFolder):
        return as_stored(model, adapter.names, Checkpoint(info.folder)).model
    return model


def shape_of(model: ModelSpecification) -> ModelShape:
    layers, dense = set(model.layers), dense_config(model)
    padded = adapter_width = 0
    if isinstance(dense, DenseConfig):
        form = specification_of(dense)
        adapter_width = sum(
            len(linear.stored) * linear.inputs + linear.outputs
            for linears in model_linears(form).layers
            for linear in linears
        )
        padded = num_parameters(
            msgspec.structs.replace(form, embeds=model.embeds, predicts=model.predicts)
        )
    rotaries = {layer.attention.rotary for layer in layers} - {None}
    table = model.table_rows * model.hidden_size
    tied = model.tie_word_embeddings and model.predicts
    return ModelShape(
        parameters=num_parameters(model),
        head_parameters=table * tied,
        table_parameters=table * (not tied),
        hidden=model.hidden_size,
        mlp_width=max(layer.mlp.width * (1 + layer.mlp.gated) for layer in layers),
        vocab=model.vocab_size,
        caches=[cache_of(layer) for layer in model.layers],
        rotary_width=sum(2 * rotary.dim for rotary in rotaries if rotary is not None),
        dense=dense,
        dense_parameters=padded,
        fp32_norms=fp32_norms(model) if padded else 0,
        adapter_width=adapter_width,
    )


def shape_of_others(
    info: ModelInfo,
    parameters: int,
    caches: Sequence[CacheSpecification] = (),
    *,
    sinks: bool = False,
) -> ModelShape:
    """From the names that ``config.json`` has for these sizes in most families.

    caches: of the loaded model; sinks: whether attention has them. Raises ``BadModelFolder`` where
    there are no caches and the names are not there.
    """
    guess = max((cache.num_heads * cache.head_dim for cache in caches), default=None)
    hidden = _number(info, "hidden_size", "n_embd", "d_model", default=guess)
    return ModelShape(
        parameters=parameters,
        head_parameters=0,
        table_parameters=0,
        hidden=hidden,
        mlp_width=2 * _number(info, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden),
        vocab=info.vocab_size,
        caches=list(caches) or _caches_of_others(info, hidden, sinks),
        rotary_width=0,
        dense=BY_TRANSFORMERS,
        estimated=not caches,
    )


def _caches_of_others(info: ModelInfo, hidden: int, sinks: bool) -> list[CacheSpecification]:
    layers = _number(info, "num_hidden_layers", "n_layer", "num_layers")
    heads = _number(info, "num_attention_heads", "n_head", "num_heads")
    one = 1 if info.config.get("multi_query") else heads
    kv_heads = _number(info, "num_key_value_heads", "num_kv_heads", default=one)
    kv_heads = heads if info.architecture in _REPEATED else kv_heads
    dim = _number(info, "head_dim", "kv_channels", default=max(1, hidden // heads))
    limits = zip(_windows_of_others(info, layers), _chunks_of_others(info, layers), strict=True)
    return [
        CacheSpecification(kv_heads, dim, heads, window, sinks=sinks, chunk=chunk)
        for window, chunk in limits
    ]


def _windows_of_others(info: ModelInfo, layers: int) -> list[int]:
    """Of each layer, 0: none. As ``layer_types`` says; without it all layers have the window."""
    window, kinds = info.config.get("sliding_window"), info.config.get("layer_types")
    unused = info.config.get("use_sliding_window") is False
    if type(window) is not int or not 0 < window < info.max_model_len or unused:
        return [0] * layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        return [window] * layers
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def _chunks_of_others(info: ModelInfo, layers: int) -> list[int]:
    """Of each layer, 0: none."""
    chunk, kinds = info.config.get("attention_chunk_size"), info.config.get("layer_types")
    if type(chunk) is not int or not 0 < chunk < info.max_model_len:
        return [0] * layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        return [0] * layers
    return [chunk if kind == "chunked_attention" else 0 for kind in kinds]


def _number(info: ModelInfo, *keys: str, default: int | None = None) -> int:
    for key in keys:
        value: Any = info.config.get(key)
        if value is not None and type(value) is int and 0 < value < 2**31:
            return value
    if default is None:
        raise BadModelFolder(
            f"{info.folder / 'config.json'}: none of {', '.join(keys)} is a positive integer; the "
            f"memory of a {info.architecture} cannot be told"
        )
    return default
