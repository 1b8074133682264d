"""Linear layers with quantized weights on a CPU: y = x Wᵀ.

int8 with a scale a row is multiplied as ``two_level_linear`` says, where the processor and torch
have that. Else, and in int4, a few rows are multiplied by torch's kernels for packed weights, which
read the codes themselves, more rows with tiles of the weight that are dequantized one after the
other. Reference: ``QuantizedWeight.dequantized``.

torch's kernels take int8 with one scale a row, and int4 in groups of 32 to 256 columns; they
multiply bf16 activations (those for fp32 are not vectorized: 25 times as slow), so that a row of an
fp32 model is rounded to bf16 on the way in and out. Which kernel a step takes depends on its rows;
a row's result depends on nothing else. Measured with AVX2 for W [4096, 1024] and one row: fp32
packed by oneDNN 1,600 to 2,300 µs, int8 320, int4 590; of 32 rows 10.7, 12.1 and 12.8 ms, with
dequantized tiles 16 to 20.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from penstock.kernels.quantized_weight import INT4_ZERO, QuantizedWeight

MOST_PACKED_ROWS = 32
"""Rows up to which the packed kernels are used."""
_TILE = 1 << 19
"""Numbers that are dequantized at once: they stay in the processor's cache."""
_GROUPS = (32, 64, 128, 256)
_INT4_OUTPUTS = 16
"""Outputs of an int4 weight are a multiple of this."""


class PackedWeight(NamedTuple):
    """A weight for torch's kernels, and the weight itself for more rows."""

    weight: QuantizedWeight
    codes: Tensor
    """int8 [N, K], the weight's own; int4: in a layout of torch's for this processor."""
    scales: Tensor
    """int8: bf16 ones [N]; int4: bf16 [K / group, N, 2], of scale and of zero."""

    @property
    def num_bytes(self) -> int:
        own = self.codes is self.weight.codes
        return self.weight.num_bytes + self.scales.nbytes + (0 if own else self.codes.nbytes)


def pack_quantized(weight: QuantizedWeight) -> PackedWeight | None:
    """The weight for this CPU's kernels; ``None`` where they do not take it."""
    outputs, width = weight.shape
    if weight.codes.device.type != "cpu":
        return None
    if weight.kind == "int8" and weight.scales is weight.zeros is weight.offsets is None:
        return PackedWeight(weight, weight.codes, torch.ones(outputs, dtype=torch.bfloat16))
    taken = weight.group in _GROUPS and width % weight.group == 0 and outputs % _INT4_OUTPUTS == 0
    if weight.kind != "int4" or not taken or weight.rows != 1 or weight.scales is None:
        return None
    codes = torch.cat((weight.codes & 15, weight.codes >> 4), 1).int()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = weight.scales.float()
    zeros = torch.zeros_like(scales)
    if weight.zeros is not None:
        zeros = (INT4_ZERO - weight.zeros.float()) * scales
    if weight.offsets is not None:
        zeros = zeros + weight.offsets
    both = torch.stack((scales, zeros), -1).to(torch.bfloat16).contiguous()
    return PackedWeight(weight, packed, both)


def quantized_product(x: Tensor, packed: PackedWeight) -> Tensor:
    """x: [N, K] fp32 or bf16. Returns [N, outputs] of its type."""
    weight = packed.weight
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    if len(x) > MOST_PACKED_ROWS:
        return _by_tiles(x, weight)
    rows = x.to(torch.bfloat16).contiguous()
    if weight.kind == "int8":
        product = torch._weight_int8pack_mm(rows, packed.codes, packed.scales)
    else:
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows, packed.codes, weight.group, packed.scales
        )
    if weight.factor is None:
        return product.to(x.dtype)
    return (product.float() * weight.factor).to(x.dtype)


def _by_tiles(x: Tensor, weight: QuantizedWeight) -> Tensor:
    outputs, width = weight.shape
    dtype = x.dtype
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        x = x.float()  # whose products are ten times as fast there
    out = torch.empty(len(x), outputs, dtype=x.dtype)
    step, codes = max(1, _TILE // width), weight._replace(factor=None)
    for first in range(0, outputs, step):
        last = min(outputs, first + step)
        out[:, first:last] = linear(x, codes.columns(x.dtype, first, last))
    if weight.factor is not None:
        out *= weight.factor  # in place: rounded to the type of x once more
    return out.to(dtype)
