"""What ``penstock bench kernels`` times: cases, each a kernel at one size."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from penstock.kernels.rotary import cos_sin_table
from penstock.services.worker.models.dense import DenseConfig


class KernelCase(msgspec.Struct, frozen=True):
    """One kernel at one size. ``make`` takes the memory and returns the call."""

    kernel: str
    size: str
    """For people: rows, contexts, shapes."""
    bytes: int
    """What must be moved at least: each operand once."""
    flops: int
    make: Callable[[], Callable[[], object]]


class NotedCall:
    """A call that the table says something about."""

    def __init__(self, call: Callable[[], object], note: str) -> None:
        self._call, self.note = call, note

    def __call__(self) -> object:
        return self._call()


class Grid(msgspec.Struct, frozen=True):
    """The sizes at which kernels are timed."""

    batches: list[int]
    """Sequences of a decode step."""
    contexts: list[int]
    """Cached positions of each sequence of a decode step."""
    rows: list[int]
    """Tokens of a prefill chunk."""
    prefixes: list[int]
    """Cached positions before a prefill chunk."""
    block_size: int

    @property
    def counts(self) -> list[int]:
        """Rows of a step: of decode and of prefill."""
        return sorted({*self.batches, *self.rows})


class Maker:
    """Makes operands of one type on one device, the same in every run."""

    def __init__(self, config: DenseConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self._generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        values = torch.empty(*shape, dtype=self.dtype, device=self.device)
        return values.normal_(0.0, scale, generator=self._generator)

    def weight(self, rows: int, width: int) -> Tensor:
        return self.normal(rows, width, scale=width**-0.5)

    def ones(self, width: int) -> Tensor:
        return torch.ones(width, dtype=self.dtype, device=self.device)

    def integers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def tables(self, positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin of every position, [P, D] fp32."""
        return cos_sin_table(self.config.head_dim, positions, self.config.rope, self.device)


def blocks_of(positions: int, block_size: int) -> int:
    return -(-positions // block_size)
