"""``CausalModel``: what the executor knows of a model, whatever computes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.kernels.attention_backend import PlannedBatch
from penstock.services.worker.models.specification import CacheSpecification

KVCache = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, each [Hkv, num_blocks, block_size, D]."""


class LayerInputs(NamedTuple):
    """Where a layer's K and V go, and how it attends."""

    slot_mapping: Tensor
    """[N] int64, see ``write_kv``."""
    attention: Sequence[PlannedBatch]


class StepInputs(NamedTuple):
    """One step on the device. N rows: decode rows, then chunks, then padding."""

    tokens: Tensor
    """[N] int64."""
    positions: Tensor
    """[N] int64."""
    layers: Sequence[LayerInputs]
    """For each layer; layers of one group that read their cache alike share one."""
    sampled: Tensor | None
    """int64: the rows whose logits are wanted; ``None``: all."""


class CausalModel(Protocol):
    """A language model over a paged KV cache."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_parameters(self) -> int: ...

    @property
    def caches(self) -> Sequence[CacheSpecification]:
        """What each layer keeps."""

    @property
    def packed(self) -> bool:
        """Whether every linear layer is packed (see ``penstock.kernels.linear``)."""

    def prepare(self, max_positions: int) -> None:
        """Make what a step needs for positions below ``max_positions``. May be called again."""

    def hidden(self, step: StepInputs, cache: KVCache, rows: Tensor | None) -> Tensor:
        """Write K and V of every row into the cache; return the last layer's result
        [len(rows), hidden] of some rows, ``None``: of all."""

    def logits(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """[len(rows), vocab]: of some rows of what ``hidden`` returned; ``None``: of all."""

    def last_hidden(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """[len(rows), hidden]: behind the last norm, of some rows of what ``hidden`` returned;
        ``None``: of all."""
