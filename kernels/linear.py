"""Linear layers: y = x Wᵀ + b, and r + x Wᵀ + b.

On the CPU the weight is kept in oneDNN's own blocked layout, packed once. Measured on Zen 5 beside
``torch.nn.functional.linear`` on the plain layout: fp32 1.8 to 2.1 times as fast for 4 to 256 rows,
bf16 2.4 times for one row and 1.9 times for 8 rows of a 0.6B model.

A row's bits in fp32 do not depend on how many rows are computed with it, from two rows on (one row
takes another path). This is measured for each shape when it is packed (``rows_agree``), since no
manual of the library promises it; a shape that fails keeps the plain layout.

For each number of rows oneDNN makes and keeps a program of about 0.6 MiB, for 1,024 of them, and
what it drops is not given back: a worker that saw every number of rows grew by 600 MiB. Hence rows
are filled up to one of few numbers (``padded_rows``).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

PACKED_ROW_MINIMUM = 2
"""Fewest rows for which a packed fp32 product gives a row the same bits as any greater number."""
_PROBED_ROWS = (2, 3, 9, 32)
_ROW_STEPS = ((8, 2), (32, 4), (64, 8), (128, 16), (256, 32), (512, 64))
"""Up to so many rows: a multiple of this. Above: of 128."""


class Linear:
    """One linear layer. The weight that it was made from is not kept when ``packed``."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pack: bool = True) -> None:
        """weight: [out, in]; bias: [out]; fp32, bf16 or fp16. ``pack``: where it is possible."""
        self.weight = weight
        self.bias = bias
        self.packed = False
        if pack and can_pack(weight):
            self._pack()

    def _pack(self) -> None:
        plain = self.weight
        with torch.inference_mode():
            self.weight = torch.ops.mkldnn._reorder_linear_weight(plain, None)
            self.packed = True
            if plain.dtype == torch.float32 and not rows_agree(self, plain.shape[1]):
                self.weight, self.packed = plain, False

    def __call__(self, x: Tensor) -> Tensor:
        """x: [N, in] of the weight's dtype. Returns [N, out]."""
        if not self.packed:
            return linear(x, self.weight, self.bias)
        rows = len(x)
        missing = padded_rows(rows) - rows
        product: Tensor = _pointwise(_fill(x, missing), self.weight, self.bias, "none", [], "")
        return product[:rows] if missing else product

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual + self(x)`` in a new tensor. residual: [N, out]; x: [N, in]."""
        if not self.packed:
            return linear(x, self.weight, self.bias).add_(residual)
        rows = len(x)
        missing = padded_rows(rows) - rows
        x, residual = _fill(x, missing), _fill(residual, missing)
        total: Tensor = _pointwise_add(x, residual, self.weight, self.bias, "add")
        return total[:rows] if missing else total


@cache
def padded_rows(rows: int) -> int:
    """The number of rows that a packed product of ``rows`` rows is computed with."""
    if rows == 1:
        return 1
    step = next((step for most, step in _ROW_STEPS if rows <= most), 128)
    return -(-rows // step) * step


def _fill(x: Tensor, missing: int) -> Tensor:
    """``x`` with ``missing`` rows of zeros below it."""
    return pad(x, (0, 0, 0, missing)) if missing else x


def _find(name: str, overload: str) -> Any:
    """An operator of this torch build, or ``None``."""
    packet = getattr(torch.ops.mkldnn, name, None)
    return getattr(packet, overload, None)


_pointwise = _find("_linear_pointwise", "default")
_pointwise_add = _find("_linear_pointwise", "binary")


def can_pack(weight: Tensor) -> bool:
    """Whether this torch, this CPU and this dtype have packed weights."""
    if weight.device.type != "cpu" or _pointwise is None or _pointwise_add is None:
        return False
    if not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def rows_agree(layer: Linear, width: int) -> bool:
    """Whether a row of ``layer`` has the same bits for several numbers of rows from 2 to 32."""
    rows = torch.randn(_PROBED_ROWS[-1], width, generator=torch.Generator().manual_seed(0))
    whole = layer(rows)
    return all(
        torch.equal(layer(rows[first : first + count]), whole[first : first + count])
        for count in _PROBED_ROWS
        for first in {0, len(rows) - count}
    )
