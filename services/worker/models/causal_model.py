"""``CausalModel``: what the executor knows of a model, whatever computes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.kernels.low_rank import AdapterRows
from penstock.services.worker.models.specification import CacheSpecification


class StepAttention(Protocol):
    """Attention of one step's rows over the paged KV cache."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Write K and V of every row into a layer's cache, then let each row attend to its own
        sequence as the layer's ``CacheSpecification`` says. Once for each layer, in their order.

        query: [N, Hq, D]; key, value: [N, Hkv, D]; normed and rotated, of any strides; sinks: [Hq],
        contiguous, where the specification has them. Returns [N, Hq * D].
        """


class VirtualRows(NamedTuple):
    """Consecutive rows of a step that are rows of a soft prompt."""

    adapter: int
    """Its number, from 1 on."""
    first: int
    """The first of the step's rows."""
    length: int
    start: int
    """Which row of the soft prompt that is."""


class StepAdapters(NamedTuple):
    """The rows of a step by adapter; those without one are in no group."""

    all: Sequence[AdapterRows] = ()
    sampled: Sequence[AdapterRows] = ()
    """Numbered as ``StepInputs.sampled`` lists them."""
    virtual: Sequence[VirtualRows] = ()


class StepInputs(NamedTuple):
    """One step on the device. N rows: decode rows, then chunks, then padding."""

    tokens: Tensor
    """[N] int64."""
    positions: Tensor
    """[N] int64."""
    attention: StepAttention
    sampled: Tensor | None
    """int64: the rows whose logits are wanted; ``None``: all."""
    adapters: StepAdapters = StepAdapters()


class CausalModel(Protocol):
    """A language model over a paged KV cache."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int:
        """Numbers of a row of what ``hidden`` returns."""

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

    def hidden(self, step: StepInputs, rows: Tensor | None) -> Tensor:
        """Write K and V of every row into the cache; return the last layer's result
        [len(rows), hidden] of some rows, ``None``: of all."""

    def logits(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """[len(rows), vocab]: of some rows of what ``hidden`` returned; ``None``: of all."""

    def last_hidden(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """[len(rows), hidden]: behind the last norm, of some rows of what ``hidden`` returned;
        ``None``: of all."""
