"""Executes step plans as one of several ranks that share a model on CPUs.

Every rank follows every plan. Those of the last stage draw together, each among its own tokens
(``penstock.kernels.sampling.shards``), so all of them have the same tokens; rank 0 tells these to
the other stages, and alone answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from penstock.kernels.cache_kinds import KVCacheKind
from penstock.kernels.exact_attention import ROW_MULTIPLE
from penstock.kernels.linear import PACKED_ROW_MINIMUM
from penstock.kernels.sampling import Adjustment, Choice, Logprobs, SamplingRows
from penstock.kernels.sampling.shard_logprobs import shard_logprobs
from penstock.kernels.sampling.shards import choose_shards
from penstock.protocol.logprobs import PackedLogprobs
from penstock.protocol.sampling import GREEDY_TEMPERATURE
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import (
    ChunkLogprobs,
    RowFailure,
    SampledLogprobs,
)
from penstock.services.worker.grammar_rows import NoGrammars, TellingGrammars, ToldGrammars
from penstock.services.worker.layer_groups import LayerGroups
from penstock.services.worker.model_executor import Hidden, ModelExecutor
from penstock.services.worker.models.rank_decoder import RankDecoder
from penstock.services.worker.plain_attention import REFERENCE, AnyAttention
from penstock.services.worker.rank_group import THREADS, Meeting, shard_of
from penstock.services.worker.slots import IntArray, PlannedChunk, PlannedStep
from penstock.services.worker.step_inputs import RowPadding


class RankExecutor(ModelExecutor):
    """A rank's share of a decoder, the KV memory of its heads, and the slots of all ranks."""

    def __init__(
        self,
        model: RankDecoder,
        capacity: EngineSizes,
        attention: AnyAttention = REFERENCE,
        kind: KVCacheKind = "auto",
    ) -> None:
        self._ranks, self._decoder = model.ranks, model
        self._told: deque[tuple[torch.Tensor, Callable[[], None]]] = deque()
        """Tokens that the others are being told."""
        super().__init__(model, capacity, attention, kind)
        self._shard = shard_of(model.ranks)
        if model.ranks.place.shares > 1:
            grammars = ToldGrammars if model.ranks.place.share else TellingGrammars
            self.grammars = grammars(
                capacity.max_num_seqs, model.vocab_size, model.ranks.from_first
            )

    def meet(self, meeting: Meeting) -> None:
        self._ranks.meet(meeting)

    def _grouped(self) -> LayerGroups:
        return self._decoder.grouped

    def _exact_rows(self) -> RowPadding:
        """Those of packed and of plain weights: ranks may differ, and their rows may not."""
        return RowPadding(ROW_MULTIPLE, PACKED_ROW_MINIMUM)

    def _choose(
        self, step: PlannedStep, hidden: Hidden
    ) -> tuple[npt.NDArray[np.int32], IntArray, list[SampledLogprobs], list[RowFailure]]:
        drawn = super()._choose(step, hidden)
        if len(drawn[0]) and self.generates and self._ranks.place.stages > 1:
            agreed = torch.from_numpy(drawn[0].astype(np.int64))
            self._told.append((agreed, self._ranks.agree(agreed)))
            if len(self._told) > THREADS:
                self._told.popleft()[1]()
        return drawn

    def _choice(
        self, logits: torch.Tensor, wanted: SamplingRows, adjustments: list[Adjustment]
    ) -> Choice:
        return choose_shards(logits, wanted, GREEDY_TEMPERATURE, adjustments, self._shard)

    def _likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        rows = SamplingRows.greedy(len(logits))
        return choose_shards(logits, rows, GREEDY_TEMPERATURE, [], self._shard).tokens

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Of all tokens on the first rank; the others' bounds of Mirostat mean nothing."""
        return self._ranks.columns(logits)

    def _logprobs_of(self, logits: torch.Tensor, tokens: torch.Tensor, most: int) -> Logprobs:
        return shard_logprobs(logits, tokens, most, self._shard)


class _Awaited(NamedTuple):
    """Tokens that rank 0 draws."""

    slots: IntArray
    tokens: torch.Tensor
    wait: Callable[[], None]

    def any_of(self, slots: IntArray) -> bool:
        return bool(np.isin(self.slots, slots).any())


class SilentExecutor(RankExecutor):
    """A rank of a stage that makes no logits: it computes its share of the layers, and draws
    nothing. It waits for a step's tokens when a later step reads them: so the stages of a pipeline
    compute different micro-batches at a time."""

    def __init__(
        self,
        model: RankDecoder,
        capacity: EngineSizes,
        attention: AnyAttention = REFERENCE,
        kind: KVCacheKind = "auto",
    ) -> None:
        super().__init__(model, capacity, attention, kind)
        self.grammars = NoGrammars(0, model.vocab_size)
        self._awaited: deque[_Awaited] = deque()
        """Tokens of steps that nobody has read yet, oldest first."""

    def hidden(self, step: PlannedStep) -> Hidden:
        self._take_tokens(step.decoding)
        return super().hidden(step)

    def reset(self) -> None:
        super().reset()
        self._awaited.clear()

    def _take_tokens(self, slots: IntArray) -> None:
        """Have the latest tokens of these slots."""
        missing = [number for number, one in enumerate(self._awaited) if one.any_of(slots)]
        keep = THREADS - 1
        for _ in range(max([len(self._awaited) - keep, *(number + 1 for number in missing)])):
            one = self._awaited.popleft()
            one.wait()
            self.slots.last_token[one.slots] = one.tokens.numpy()

    def _choose(
        self, step: PlannedStep, hidden: Hidden
    ) -> tuple[npt.NDArray[np.int32], IntArray, list[SampledLogprobs], list[RowFailure]]:
        rows = len(step.sampled)
        if rows and self.generates:
            tokens = torch.zeros(rows, dtype=torch.int64)
            self._awaited.append(_Awaited(step.sampled, tokens, self._ranks.agree(tokens)))
        return np.zeros(rows, np.int32), np.zeros(rows, np.int64), [], []

    def _recall(self, step: PlannedStep, hidden: Hidden) -> None:
        return

    def _prompt(self, hidden: Hidden, first: int, chunk: PlannedChunk) -> ChunkLogprobs:
        return ChunkLogprobs(chunk.slot, chunk.start, PackedLogprobs(0, b""))
