"""What each layer of a model costs a decode step: the bytes of weights that it reads. Needs no
torch."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from penstock.services.worker.models.adapter import TensorNames
from penstock.services.worker.models.linear_specification import head_linear, model_linears
from penstock.services.worker.models.sizes import layer_parameters
from penstock.services.worker.models.specification import ModelSpecification
from penstock.services.worker.models.stage_division import divided
from penstock.services.worker.quantization.quantization import Quantization


class LayerCosts(NamedTuple):
    """Bytes of weights, as the files or ``--quantization`` have them; alike on all ranks."""

    layers: tuple[int, ...]
    embedding: int
    """Of which a step reads its tokens' rows alone."""
    head: int
    """Read by the last stage, also where it is the embedding."""


def layer_costs(
    model: ModelSpecification,
    item_bytes: int,
    quantization: Quantization | None,
    names: TensorNames,
) -> LayerCosts:
    """item_bytes: of a number that is not quantized; names: of the checkpoint."""
    linears = model_linears(model, names, quantization)
    layers = [layer_parameters(layer, model.hidden_size) * item_bytes for layer in model.layers]
    for number, each in enumerate(linears.layers):
        for one in each:
            layers[number] += one.num_bytes(item_bytes, on_cpu=False)
            layers[number] -= one.num_parameters * item_bytes
    head = linears.head if linears.head.formats else head_linear(model)
    table = model.vocab_size * model.hidden_size * item_bytes
    return LayerCosts(tuple(layers), table, head.num_bytes(item_bytes, on_cpu=False))


@lru_cache(16)
def balanced(costs: LayerCosts, stages: int) -> tuple[int, ...]:
    """Layers of each stage, so that the one that reads the most reads the least."""
    return divided(costs.layers, stages, costs.head)


def stage_bytes(costs: LayerCosts, counts: tuple[int, ...]) -> list[int]:
    """What a decode step reads in each stage."""
    found, begin = list[int](), 0
    for count in counts:
        found.append(sum(costs.layers[begin : begin + count]))
        begin += count
    found[-1] += costs.head
    return found
