"""Linear layers on a CPU: y = x Wᵀ + b, and r + x Wᵀ + b.

The weight is in oneDNN's own blocked layout, packed once. Measured on Zen 5 beside
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

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

PACKED_ROW_MINIMUM = 2
"""Fewest rows for which a packed fp32 product gives a row the same bits as any greater number."""
_PROBED_ROWS = (2, 3, 9, 32)
_ROW_STEPS = ((8, 2), (32, 4), (64, 8), (128, 16), (256, 32), (512, 64))
"""Up to so many rows: a multiple of this. Above: of 128."""


def packed_weight(weight: Tensor) -> Tensor | None:
    """[out, in] in the layout of ``packed_linear``; ``None`` where it has to stay plain."""
    if not can_pack(weight):
        return None
    with torch.inference_mode():
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        agree = weight.dtype != torch.float32 or rows_agree(
            lambda rows: packed_linear(rows, packed, None), weight.shape[1]
        )
    return packed if agree else None


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x: [N, in]; weight: from ``packed_weight``, of x's dtype; bias: [out]. Returns [N, out]."""
    rows = len(x)
    missing = padded_rows(rows) - rows
    product: Tensor = _pointwise(_fill(x, missing), weight, bias, "none", [], "")
    return product[:rows] if missing else product


def add_packed_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``residual + packed_linear(x, weight, bias)`` in a new tensor. residual: [N, out]."""
    rows = len(x)
    missing = padded_rows(rows) - rows
    x, residual = _fill(x, missing), _fill(residual, missing)
    total: Tensor = _pointwise_add(x, residual, weight, bias, "add")
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


def rows_agree(product: Callable[[Tensor], Tensor], width: int) -> bool:
    """Whether a row of a product of [N, width] has the same bits for several N from 2 to 32."""
    rows = torch.randn(_PROBED_ROWS[-1], width, generator=torch.Generator().manual_seed(0))
    whole = product(rows)
    return all(
        torch.equal(product(rows[first : first + count]), whole[first : first + count])
        for count in _PROBED_ROWS
        for first in {0, len(rows) - count}
    )
