"""The gated activation of Llama-like MLPs: SiLU(gate) * up.

    SiLU(x) = x / (1 + exp(-x))

Source: Shazeer, "GLU Variants Improve Transformer" (2020), SwiGLU.
"""

from __future__ import annotations

import torch
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up: [N, 2 * I], gate first; fp32, bf16 or fp16. Returns [N, I] of the same dtype.

    In fp32 not ``torch.silu``: on the CPU that takes another path for the elements that do not
    fill a vector, so a value's last bit would depend on its place in the batch. ``torch.exp``
    does not, and the other operations round correctly. Other types are computed in fp32 too: on
    the CPU that takes half the time of a bf16 ``silu``.
    """
    gate, up = gate_up.float().chunk(2, -1)
    if gate_up.dtype != torch.float32:
        return torch.nn.functional.silu(gate, inplace=True).mul_(up).to(gate_up.dtype)
    sigmoid_inverse = gate.neg().exp_().add_(1.0)
    return torch.div(gate, sigmoid_inverse, out=sigmoid_inverse).mul_(up)
