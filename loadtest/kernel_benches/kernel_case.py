"""What ``penstock bench kernels`` times: cases, each a kernel at one size."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from penstock.kernels.cache_kinds import KVCacheKind, stored_head
from penstock.kernels.quantized_cache import cache_type, columns, parts, quantize
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

    def __init__(
        self,
        config: DenseConfig,
        dtype: torch.dtype,
        device: torch.device,
        kv_kind: KVCacheKind = "auto",
        window: int = 0,
    ) -> None:
        """kv_kind: of keys and values; window: positions that a query sees, 0: all up to its
        own."""
        self.config, self.dtype, self.device = config, dtype, device
        self.kv_kind: KVCacheKind = kv_kind
        self.window = window
        self._generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        values = torch.empty(*shape, dtype=self.dtype, device=self.device)
        return values.normal_(0.0, scale, generator=self._generator)

    def weight(self, rows: int, width: int) -> Tensor:
        return self.normal(rows, width, scale=width**-0.5)

    def cache(self, *shape: int) -> Tensor:
        """Keys or values. shape: of plain ones, [..., block_size, D]."""
        plain = self.normal(*shape)
        if self.kv_kind == "auto":
            return plain
        kind = cache_type(self.kv_kind, self.dtype)
        size = (*shape[:-1], columns(shape[-1], kind))
        cache = torch.empty(size, dtype=torch.int8, device=self.device).view(kind)
        for part, made in zip(parts(cache), quantize(plain, kind), strict=True):
            of_bytes = torch.int8 if part.dtype == kind else part.dtype
            part.view(of_bytes).copy_(made.view(of_bytes))
        return cache

    @property
    def cached_head(self) -> int:
        """Bytes of a position's key or value of one head."""
        return stored_head(self.config.head_dim, self.dtype.itemsize, self.kv_kind)

    def read(self, start: int, count: int) -> int:
        """Positions that queries of ``count`` from ``start`` on see together."""
        return min(start, self.window - 1) + count if self.window else start + count

    def ones(self, width: int) -> Tensor:
        return torch.ones(width, dtype=self.dtype, device=self.device)

    def integers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def tables(self, positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin of every position, [P, D] fp32."""
        return cos_sin_table(self.config.head_dim, positions, self.config.rope, self.device)


def blocks_of(positions: int, block_size: int) -> int:
    return -(-positions // block_size)
