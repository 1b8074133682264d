"""A decoder's weights, quantized and plain of the same numbers, and a step of its products."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from penstock.kernels.rotary import RopeParameters
from penstock.services.worker.gpu.layer_products import LayerProducts
from penstock.services.worker.gpu.workspace import Workspace, make_workspace
from penstock.services.worker.models.dense import DenseConfig, DenseLayer, DenseWeights
from penstock.services.worker.models.dense_form import allocate_dense
from penstock.services.worker.models.linear import Linear
from penstock.services.worker.models.linear_specification import LayerLinears
from penstock.services.worker.models.quantized_linear import (
    QuantizedLinear,
    SummedQuantizedLinear,
)
from penstock.services.worker.models.weight_words import give_words
from penstock.services.worker.quantization.online import OnlineFormat

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-6
CONFIG = DenseConfig(512, 256, 2, 4, 2, 64, 384, EPS, RopeParameters(1e4), False)


class Twins(NamedTuple):
    coded: DenseWeights
    """In words."""
    plain: DenseWeights
    """Of the same numbers."""


def twins(
    kind: Any, dtype: torch.dtype = torch.float32, ranks: Any = None, config: DenseConfig = CONFIG
) -> Twins:
    """ranks: who sum the products that are divided by inputs, if any do."""
    generator = torch.Generator(DEVICE).manual_seed(4)
    weights = allocate_dense(config, dtype, DEVICE)
    weights.embedding.normal_(generator=generator)
    weights.norm.fill_(1.0)
    coded, plain = list[DenseLayer](), list[DenseLayer]()
    for layer in weights.layers:
        norms: dict[str, Any] = {}
        for name in ("input_norm", "post_norm"):
            spread = torch.randn(config.hidden_size, generator=generator, device=DEVICE)
            norms[name] = (1.0 + 0.1 * spread).to(dtype)
        both = [_twin(linear, kind, dtype, generator, ranks) for linear in layer.linears]
        for each, linears in zip((coded, plain), zip(*both, strict=True), strict=True):
            of_layer: Any = LayerLinears(*linears)
            each.append(msgspec.structs.replace(layer, linears=of_layer, **norms))
    give_words([linear for layer in coded for linear in layer.linears])
    return Twins(*(msgspec.structs.replace(weights, layers=each) for each in (coded, plain)))


def _twin(
    linear: Linear, kind: Any, dtype: torch.dtype, generator: torch.Generator, ranks: Any
) -> tuple[QuantizedLinear, Linear]:
    stored = linear.specification
    formats = (OnlineFormat(kind),) * len(stored.stored)
    specification = msgspec.structs.replace(stored, formats=formats)
    coded = QuantizedLinear(specification, dtype, DEVICE)
    if ranks is not None and stored.shard == "inputs":
        coded = SummedQuantizedLinear(specification, dtype, DEVICE, ranks)
    coded.draw(stored.inputs**-0.5, generator)
    (piece,) = coded.pieces
    plain: Any = piece
    return coded, Linear(stored, plain.dequantized(dtype))


def a_space(
    config: DenseConfig = CONFIG, dtype: torch.dtype = torch.float32, rows: int = 40
) -> Workspace:
    return make_workspace(config, rows, 4, dtype, DEVICE)


def step(products: LayerProducts, space: Workspace, rows: int) -> list[Tensor]:
    """What a step of these products leaves, with something else in place of attention."""
    generator = torch.Generator().manual_seed(rows)
    hidden, layers = space.residual.shape[1], len(products._layers)
    space.residual[:rows] = torch.randn(rows, hidden, generator=generator).to(space.residual)
    found = []
    products.begin(rows)
    for layer in range(layers):
        products.qkv(layer, rows)
        found.append(space.qkv[:rows].clone())
        attended = torch.randn(space.attention_output[:rows].shape, generator=generator)
        space.attention_output[:rows] = attended.to(space.residual)
        products.output(layer, rows)
        products.gate_up(layer, rows)
        products.down(layer, rows)
    products.end(rows)
    return [*found, space.residual[:rows].clone(), space.normed[:rows].clone()]


def agree(found: list[Tensor], wanted: list[Tensor], most: float) -> None:
    for one, other in zip(found, wanted, strict=True):
        difference = (one.float() - other.float()).norm() / other.float().norm()
        assert float(difference) < most
