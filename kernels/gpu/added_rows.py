"""What some rows of a product get more, as kernels that read the product read it.

    value[row] = product[row] + more[row]           of rows that have an adapter

So what adapters add is computed beside the product, not behind it. Reference: the sum itself.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class AddedRows(NamedTuple):
    """What is added to the first N rows of a product."""

    more: Tensor
    """[N, outputs] contiguous; rows that get nothing may hold anything."""
    adapters: Tensor
    """[N] int32 or more: below 0 where a row gets nothing."""


@triton.jit
def with_added(value, more, adapters, row, at, inside):
    """``value``, fp32, of one row with what it gets more, if there is anything; at: the places of
    its values, where ``inside``."""
    if more is not None:
        has = tl.load(adapters + row) >= 0
        value += tl.load(more + at, mask=inside & has, other=0.0).to(tl.float32)
    return value
