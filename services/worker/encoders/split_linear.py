"""Linear layers of an encoder in float32 whose products are computed on a GPU's tensor cores."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from penstock.kernels.gpu.split_linear import split_linear, split_weight
from penstock.services.worker.models.linear import Linear

_TIMED_ROWS = 1024
_PRODUCTS, _RUNS = 10, 5


class SplitLinear(Linear):
    """See ``penstock.kernels.gpu.split_linear``."""

    def __init__(self, plain: Linear, activation: str = "") -> None:
        """plain: in fp32, not packed. Its weight is kept in two parts, as many bytes together.
        activation: of its results."""
        nothing = plain.weight.new_empty(0, plain.weight.shape[1])
        super().__init__(plain.specification, nothing, plain.bias)
        self._parts, self._activation = split_weight(plain.weight), activation

    def __call__(self, x: Tensor) -> Tensor:
        """x: [N, inputs] fp32. Returns [N, outputs]."""
        return split_linear(x, self._parts, self.bias, activation=self._activation)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual + self(x)`` in a new tensor. residual: [N, outputs]; x: [N, inputs]."""
        return split_linear(x, self._parts, self.bias, residual, self._activation)


def why_not_split(linear: Linear) -> str:
    """Why this layer and those like it had better stay as they are; empty: split, they are faster.
    Raises what a compiler, a driver or a launch raises."""
    weight = linear.weight
    if weight.dtype != torch.float32 or linear.packed:
        return f"weights of {weight.dtype}"
    if weight.device.type != "cuda":
        return ""
    x = torch.randn(_TIMED_ROWS, weight.shape[1], device=weight.device)
    split, plain = (_seconds(each, x) for each in (SplitLinear(linear), linear))
    return "" if split < plain else f"{plain * 1e6:.0f} µs take {split * 1e6:.0f} µs so"


def _seconds(linear: Linear, x: Tensor) -> float:
    """For a product, without what its launch costs the host; the least of a few runs."""
    linear(x)
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(_PRODUCTS):
            linear(x)
    for _ in range(_RUNS):
        torch.cuda.synchronize(x.device)
        begun = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize(x.device)
        found.append(time.perf_counter() - begun)
    return min(found) / _PRODUCTS
