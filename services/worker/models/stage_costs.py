"""What each layer of a model costs a decode step: the bytes that it reads. Needs no torch."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from penstock.services.worker.models.adapter import TensorNames
from penstock.services.worker.models.linear_specification import head_linear, model_linears
from penstock.services.worker.models.sizes import layer_parameters
from penstock.services.worker.models.specification import ModelSpecification
from penstock.services.worker.models.stage_division import divided
from penstock.services.worker.quantization.quantization import Quantization

DRAWN_ROWS = 8
"""Rows of a decode step that is counted with. Their logits are written once and read once, as fp32:
in A's shape a third of a layer's bytes."""


class LayerCosts(NamedTuple):
    """Bytes of weights, as the files or ``--quantization`` have them; alike on all ranks."""

    layers: tuple[int, ...]
    embedding: int
    """Of which a step reads its tokens' rows alone."""
    head: int
    """Read by the last stage, also where it is the embedding."""
    draw: int
    """Of logits, which are no weights."""

    @property
    def last(self) -> int:
        """What the last stage has besides its layers."""
        return self.head + self.draw


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
    draw = 2 * 4 * DRAWN_ROWS * model.vocab_size
    return LayerCosts(tuple(layers), table, head.num_bytes(item_bytes, on_cpu=False), draw)


@lru_cache(16)
def balanced(costs: LayerCosts, stages: int) -> tuple[int, ...]:
    """Layers of each stage, so that the one that reads the most reads the least."""
    return divided(costs.layers, stages, costs.last)
