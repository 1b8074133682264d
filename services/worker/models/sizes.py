"""How many numbers a model's weights are, by its specification alone: nothing is allocated.

Models in the form of the kernels of GPUs are counted by ``dense.specification_of`` it.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.services.worker.models.adapter import LLAMA_NAMES, TensorNames
from penstock.services.worker.models.linear_specification import (
    head_linear,
    layer_linears,
    model_linears,
)
from penstock.services.worker.models.specification import (
    Attention,
    Layer,
    ModelSpecification,
    Norm,
)
from penstock.services.worker.quantization.quantization import Quantization


def num_parameters(model: ModelSpecification) -> int:
    """What ``allocate_weights`` allocates."""
    head = head_linear(model).num_parameters if model.head_rows else 0
    layers = sum(layer_parameters(layer, model.hidden_size) for layer in model.layers)
    table = model.table_rows * model.hidden_size
    return table + head + layers + _norm(model.norm, model.hidden_size)


class WeightSize(NamedTuple):
    """Of all weights of a model, some of them quantized."""

    coded_bytes: int
    plain_numbers: int
    """Numbers in the model's type."""

    def num_bytes(self, item_bytes: int) -> int:
        return self.coded_bytes + self.plain_numbers * item_bytes


def quantized_size(
    model: ModelSpecification,
    quantization: Quantization,
    *,
    on_cpu: bool,
    names: TensorNames = LLAMA_NAMES,
) -> WeightSize:
    """Once they are loaded. names: of the checkpoint."""
    coded = _quantized_bytes(model, quantization, 0, on_cpu, names)
    return WeightSize(coded, _quantized_bytes(model, quantization, 1, on_cpu, names) - coded)


def _quantized_bytes(
    model: ModelSpecification,
    quantization: Quantization,
    item_bytes: int,
    on_cpu: bool,
    names: TensorNames,
) -> int:
    linears = model_linears(model, names, quantization)
    found = num_parameters(model) * item_bytes
    for layer in linears.layers:
        for each in layer:
            found -= each.num_parameters * item_bytes
            found += each.num_bytes(item_bytes, on_cpu=on_cpu)
    head = linears.head
    if not head.formats:
        return found
    plain = 0 if model.tie_word_embeddings else head.num_parameters * item_bytes
    return found - plain + head.num_bytes(item_bytes, on_cpu=on_cpu)


def fp32_norms(model: ModelSpecification) -> int:
    """Numbers of the norms that the kernels of GPUs have in fp32, as ``dense_form`` makes them."""
    last = model.norm.plus_one or model.logit_multiplier != 1.0
    found = _norm(model.norm, model.hidden_size) if last else 0
    for layer in model.layers:
        norms = (
            layer.input_norm,
            layer.mlp_norm,
            layer.attention_output_norm,
            layer.mlp_output_norm,
        )
        changed = [norm for norm in norms if norm is not None and norm.plus_one]
        found += sum(_norm(norm, model.hidden_size) for norm in changed)
        of_heads = layer.attention.qk_norm
        if of_heads is not None and of_heads.plus_one:
            found += _query_key_norms(layer.attention)
    return found


def layer_parameters(layer: Layer, hidden: int) -> int:
    """Numbers of the weights of one layer. hidden: of a row of the residual stream."""
    norms = (
        layer.input_norm,
        layer.mlp_norm,
        layer.attention_output_norm,
        layer.mlp_output_norm,
    )
    linears = sum(each.num_parameters for each in layer_linears(layer, hidden))
    rest = _query_key_norms(layer.attention) + layer.attention.num_heads * layer.attention.sinks
    return linears + sum(_norm(norm, hidden) for norm in norms) + rest


def _norm(norm: Norm | None, hidden: int) -> int:
    return 0 if norm is None else hidden * (1 + norm.bias)


def _query_key_norms(attention: Attention) -> int:
    if attention.qk_norm is None:
        return 0
    if attention.qk_norm_over == "head":
        return 2 * attention.head_dim
    return (attention.num_heads + attention.num_kv_heads) * attention.head_dim
