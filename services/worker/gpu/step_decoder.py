"""What the executor for CUDA devices asks of whatever computes a step's layers.

A step has two parts, so that each can be a graph of its own: the *body* writes K and V of every
row; the *head* makes logits of the sampled rows. Drawing from these is the same for every model.

The rows of a step: decode rows first, one a slot; then the tokens of chunks; then padding. What
the kernels must know of them lies on the device (``BatchState``, ``ChunkRows``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from penstock.kernels.gpu.draw import commit, draw
from penstock.protocol.sampling import GREEDY_TEMPERATURE
from penstock.services.worker.gpu.batch_state import BatchState
from penstock.services.worker.gpu.drafted_rows import StepRows
from penstock.services.worker.gpu.graph_sizes import GraphSizes
from penstock.services.worker.gpu.kv_pool import KVPool
from penstock.services.worker.gpu.workspace import LogitsSpace


class StepDecoder(ABC):
    """A model with its KV cache, in memory that is planned before the first step."""

    state: BatchState
    space: LogitsSpace
    vocab_size: int
    num_kv_heads: int
    may_wait: bool
    """Whether a step may wait for the device, as code of others does, so that no graph holds it."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """Which kernels compute it and why, for the log."""

    @property
    @abstractmethod
    def kv_pool(self) -> KVPool:
        """Its KV memory."""

    @property
    def row_classes(self) -> Sequence[int]:
        """Numbers of rows of mixed steps that have kernels which no others have."""
        return ()

    @property
    def widened_room(self) -> tuple[int, int]:
        """See ``LayerAttention``."""
        return 0, 0

    @property
    @abstractmethod
    def shares_prefixes(self) -> bool:
        """Whether a kernel can read a prefix once for all rows that share it."""

    @abstractmethod
    def graph_sizes(self, most: int, max_rows: int) -> GraphSizes:
        """The steps that graphs are worth their memory for.

        most: sequences; max_rows: rows of the largest step.
        """

    @abstractmethod
    def body(
        self,
        rows: int,
        num_decode: int,
        chunks: StepRows | None,
        shared: bool = False,
    ) -> None:
        """The layers for ``rows`` rows, of which the first ``num_decode`` may be decode rows.

        What ``BatchState.rows`` names is decoded; its padding costs next to nothing. chunks: the
        step's chunk rows, or all its rows where it has drafts; ``None`` when all are decode rows.
        shared: read the prefix that the state names as shared once; only where it
        ``shares_prefixes``.
        """

    @abstractmethod
    def head(self, count: int) -> None:
        """After the body: logits of the ``count`` rows that ``BatchState.sample_index`` names."""

    @abstractmethod
    def head_of_all(self, rows: int, count: int) -> None:
        """Do what ``head`` does, for a step in which ``row_logits`` reads other rows than those
        that are sampled.

        rows: those of the body.
        """

    @abstractmethod
    def row_logits(self, first: int, count: int) -> Tensor:
        """After ``head_of_all``: logits [count, V] of the step's rows from ``first`` on, no more
        than logits rows have memory; they are overwritten by the next."""

    def draw(self, count: int) -> None:
        """Choose a token for each logits row, greedy or plainly drawn, and advance its slot."""
        space, state = self.space, self.state
        splits = draw(
            space.logits[:count], state.sample_slots, state.temperature, state.seed_low,
            state.seed_high, state.num_output, space.best, space.token, GREEDY_TEMPERATURE,
        )  # fmt: skip
        self.commit(count, splits)

    def commit(self, count: int, splits: int) -> None:
        """Advance the slots by the tokens in ``best`` and ``token``."""
        space, state = self.space, self.state
        commit(
            space.best, space.token, state.sample_slots, state.last_token, state.position,
            state.num_output, space.result, count, splits,
        )  # fmt: skip
