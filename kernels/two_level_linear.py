"""Linear layers with int8 weights on a CPU, by integers alone: y = x Wᵀ.

FBGEMM multiplies int8 weights with activations of 7 bits as fast as memory gives the weights, for
one row and for many. Seven bits are too few for activations, so that a row is given twice: rounded
to 127 levels, and what that leaves, as finely again. Together they are 14 bits, more than bf16 has,
and the weights are read once for both.

    x = s (hi + lo / 126),  hi, lo whole numbers from -63 to 63, s = max|x| / 63 of the row

All products and sums are of whole numbers, so a row's bits depend on nothing but the row. The
library finds its scale and zero from the lowest and highest number that it is given; a row of -64
and 63 makes these 1 and 64, and what it is given is what it multiplies. With 7 bits no sum of two
products passes the 16 bits that instructions ahead of VNNI keep them in.

torch says that its quantized tensors, which are how FBGEMM gets a weight, will go; where they have
gone, or the product is not what it should be, ``kernels.quantized_linear`` does without. Measured
with AVX2, one thread, beside fp32 packed by oneDNN and torch's ``_weight_int8pack_mm``, µs: W
[65536, 1024], which no cache holds, one row 6,600, 22,000 and 12,000; W [4096, 1024], 8 rows 1,400,
2,500 and 2,500, 128 rows 17,800, 19,000 and 42,000.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.kernels.quantized_weight import QuantizedWeight

_MOST = 63
_STEPS = 126
_MOST_ROWS = 256
"""Rows of a product: two rows of fp32 are made of each."""
_MOST_INPUTS = 1 << 16
"""Sums of more products might pass 32 bits."""
_MOST_ERROR = 1e-3


class TwoLevelWeight(NamedTuple):
    handle: Any
    """The library's own copy of the codes, with the factors of their rows."""
    outputs: int
    inputs: int
    order: Tensor | None
    """As in ``QuantizedWeight``."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.inputs

    @property
    def num_bytes(self) -> int:
        order = 0 if self.order is None else self.order.nbytes
        return self.outputs * (self.inputs + 4) + order


def two_level_weight(weight: QuantizedWeight) -> TwoLevelWeight | None:
    """The weight for this processor; ``None`` where that is none, or there is no such product."""
    outputs, inputs = weight.shape
    plain = weight.kind == "int8" and weight.scales is weight.zeros is weight.offsets is None
    if not plain or not 2 <= inputs <= _MOST_INPUTS or weight.codes.device.type != "cpu":
        return None
    factor = weight.factor
    if factor is None:
        factor = torch.ones(outputs, dtype=torch.float32)
    try:
        made = TwoLevelWeight(_handle(weight.codes, factor), outputs, inputs, weight.order)
        return made if _agrees(made, weight) else None
    except (AttributeError, RuntimeError):
        return None


def _handle(codes: Tensor, factor: Tensor) -> Any:
    """Raises what torch raises where it has no FBGEMM, or none for this processor."""
    engine = torch.backends.quantized.engine
    with warnings.catch_warnings(), torch.inference_mode(False):
        warnings.simplefilter("ignore")  # says that quantized tensors will go
        try:
            torch.backends.quantized.engine = "fbgemm"
            zeros = torch.zeros(len(codes), dtype=torch.int64)
            quantized = torch._make_per_channel_quantized_tensor(
                codes.clone(), factor.double(), zeros, 0
            )
            return torch.ops.quantized.linear_prepack(quantized, None)
        finally:
            torch.backends.quantized.engine = engine


def _agrees(made: TwoLevelWeight, weight: QuantizedWeight) -> bool:
    """Whether some rows have the right products, and the same bits in any company."""
    rows = torch.randn(5, made.inputs, generator=torch.Generator().manual_seed(0))
    rows[3] *= 1e3
    some = weight._replace(order=None).reordered(torch.arange(min(64, weight.shape[0])))
    product = two_level_product(rows, made._replace(order=None))
    wanted = rows.double() @ some.dequantized().double().t()
    error = (product[:, : wanted.shape[1]] - wanted).norm(dim=1) / wanted.norm(dim=1)
    alone = two_level_product(rows[4:], made._replace(order=None))
    return bool((error < _MOST_ERROR).all()) and torch.equal(alone[0], product[4])


def two_level_product(x: Tensor, weight: TwoLevelWeight) -> Tensor:
    """x: [N, K] of any float type. Returns [N, outputs] of its type. Rows that are not finite have
    results that are not."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    if len(x) <= _MOST_ROWS:
        return _product(x, weight)
    return torch.cat([_product(rows, weight) for rows in torch.split(x, _MOST_ROWS)])


def _product(x: Tensor, weight: TwoLevelWeight) -> Tensor:
    count = len(x)
    span = torch.linalg.vector_norm(x, torch.inf, 1, True, dtype=torch.float32)
    scale = span.clamp_(min=1e-30).div_(_MOST)
    given = torch.empty(2 * count + 1, x.shape[1], dtype=torch.float32)
    high, low = given[:count], given[count : 2 * count]
    torch.div(x, scale, out=low)
    torch.round(low, out=high)
    low.sub_(high).mul_(_STEPS).round_()
    given[2 * count] = _limits(x.shape[1])
    given.nan_to_num_(0.0, 0.0, 0.0)  # else another row's company would change the library's scale
    both: Tensor = torch.ops.quantized.linear_dynamic(given, weight.handle, True)
    product = torch.add(both[:count], both[count : 2 * count], alpha=1 / _STEPS)
    return product.mul_(scale).to(x.dtype)


@functools.cache
def _limits(inputs: int) -> Tensor:
    """A row whose lowest and highest number are those that the library shall find."""
    row = torch.zeros(inputs)
    row[0], row[1] = -_MOST - 1, _MOST
    return row
