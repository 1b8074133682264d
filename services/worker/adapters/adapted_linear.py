"""A linear layer whose results get more for the rows that have an adapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from penstock.kernels.low_rank import AdapterRows, LowRank, add_low_rank
from penstock.services.worker.models.linear import Linear, SummedLinear
from penstock.services.worker.models.linear_specification import LinearSpecification
from penstock.services.worker.models.quantized_linear import SummedQuantizedLinear


class Product(Protocol):
    """What a layer is computed with: a ``Linear``, or one with adapters."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor: ...


class StepRows:
    """Which rows have which adapter, of the product that comes next. All linear layers share it."""

    def __init__(self) -> None:
        self.groups: Sequence[AdapterRows] = ()


class AdaptedLinear:
    """A ``Product``. In a step without adapters it is the linear layer itself, bit for bit."""

    def __init__(self, linear: Linear, step: StepRows, places: int) -> None:
        """places: adapters that a step may have, at most."""
        self._linear, self._step = linear, step
        self.updates: list[LowRank | None] = [None] * (1 + places)
        """By the number of an adapter; 0 stands for none."""
        self._summed: Callable[[Tensor], Tensor] | None = None
        if isinstance(linear, SummedLinear | SummedQuantizedLinear):
            self._summed = linear.ranks.sum

    @property
    def specification(self) -> LinearSpecification:
        return self._linear.specification

    def __call__(self, x: Tensor) -> Tensor:
        return self._adapted(self._linear(x), x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._adapted(self._linear.add_to(residual, x), x)

    def _adapted(self, out: Tensor, x: Tensor) -> Tensor:
        if self._step.groups:
            add_low_rank(out, x, self._step.groups, self.updates, self._summed)
        return out
