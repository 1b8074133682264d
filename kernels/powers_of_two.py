"""Powers of two on the CPU, with the same bits wherever an element stands.

torch computes ``exp2`` of fp32 two to three times as fast as ``exp`` (84 and 243 µs for 294,912
elements with AVX-512, 128 and 240 with AVX2; one thread), and exp(x) = 2 ** (x * log2(e)).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
_GRAIN = 32768
"""Elements of an operation of torch that one thread computes at least."""
VECTORS = 32
"""Elements that ``exp2`` computes together, or a multiple of them, on every CPU. Those that are
left over at the end of a thread's part are computed by other instructions, with other bits."""


def exp2_in_place(x: Tensor) -> Tensor:
    """2 to the power of each element, whose bits depend neither on its place nor on the threads.

    x: contiguous fp32 on the CPU, a multiple of 32 elements. torch divides the elements of an
    operation evenly among as many threads as get ``_GRAIN`` each; here these parts are whole
    vectors.
    """
    flat, threads = x.view(-1), torch.get_num_threads()
    count = len(flat)
    unit = VECTORS * threads if count > threads * _GRAIN else _GRAIN
    whole = count - count % unit
    if whole in (0, count):
        flat.exp2_()
    else:
        flat[:whole].exp2_()
        flat[whole:].exp2_()
    return x
