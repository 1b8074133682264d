"""The activations of MLPs, and their gated forms: activation(gate) * up.

    silu(x)      = x / (1 + exp(-x))
    gelu(x)      = x * (1 + erf(x / sqrt(2))) / 2
    gelu_tanh(x) = x / (1 + exp(-2 u)),  u = sqrt(2 / pi) * (x + 0.044715 x³)
    relu2(x)     = max(x, 0)²

Sources: Shazeer, "GLU Variants Improve Transformer" (2020); Hendrycks and Gimpel, "Gaussian Error
Linear Units" (2016), whose tanh form is the third line, since (1 + tanh(u)) / 2 is
1 / (1 + exp(-2 u)); So et al., "Primer" (2021).

In fp32 none of torch's own: on the CPU these take another path for the elements that do not fill a
vector, so a value's last bit would depend on its place in the batch. ``torch.exp`` and
``torch.erf`` do not, and the other operations round correctly. Other types are computed in fp32
too. On the CPU many rows are computed a few at a time, so that what lies between stays in the
cache: 3.5 ms instead of 4.9 to 14 for 1,900 rows of 1,536 bf16 numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from penstock.kernels.powers_of_two import LOG2_E, VECTORS, exp2_in_place

Activation = Callable[[Tensor], Tensor]
"""Takes fp32 that it may overwrite, returns fp32."""


ROWS_AT_ONCE = 64
"""On the CPU."""


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up: [N, 2 * I], gate first; fp32, bf16 or fp16. Returns [N, I] of the same dtype."""
    if gate_up.dtype == torch.float32:
        return _gated(gate_up, _silu)
    return _gated(gate_up, _silu_in_place)


def gated(name: str) -> Activation:
    """A function of gate_up as ``silu_and_mul``; name: a key of ``ACTIVATIONS``."""
    if name == "silu":
        return silu_and_mul
    activation = ACTIVATIONS[name]
    return lambda gate_up: _gated(gate_up, activation)


def plain(name: str) -> Activation:
    """A function of [N, I] of any type that returns the same; name: a key of ``ACTIVATIONS``."""
    activation = ACTIVATIONS[name]
    return lambda x: activation(x.float()).to(x.dtype)


def _gated(gate_up: Tensor, activation: Activation) -> Tensor:
    if gate_up.device.type != "cpu" or len(gate_up) <= ROWS_AT_ONCE:
        gate, up = gate_up.float().chunk(2, -1)
        return activation(gate).mul_(up).to(gate_up.dtype)
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    for rows, into in zip(
        torch.split(gate_up, ROWS_AT_ONCE), torch.split(out, ROWS_AT_ONCE), strict=True
    ):
        gate, up = rows.float().chunk(2, -1)
        if out.dtype == torch.float32:
            torch.mul(activation(gate), up, out=into)
        else:
            into.copy_(activation(gate).mul_(up))
    return out


def _silu_in_place(x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x, inplace=True)


def _silu(x: Tensor) -> Tensor:
    if x.device.type == "cpu" and x.shape[-1] % VECTORS == 0:
        inverse = exp2_in_place(x.mul(-LOG2_E)).add_(1.0)
    else:
        inverse = x.neg().exp_().add_(1.0)
    return torch.div(x, inverse, out=inverse)


def _gelu(x: Tensor) -> Tensor:
    return torch.erf(x * math.sqrt(0.5)).add_(1.0).mul_(0.5).mul_(x)


def _gelu_tanh(x: Tensor) -> Tensor:
    inner = (x * x).mul_(x).mul_(0.044715).add_(x).mul_(-2.0 * math.sqrt(2.0 / math.pi))
    inverse = inner.exp_().add_(1.0)
    return torch.div(x, inverse, out=inverse)


def _relu2(x: Tensor) -> Tensor:
    positive = torch.relu(x)
    return positive.mul_(positive)


ACTIVATIONS: dict[str, Activation] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": torch.relu,
    "relu2": _relu2,
}
