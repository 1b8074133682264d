"""One rank of several that share a model, on a CUDA device.

Its layers are the same kernels over its share, with sums across the ranks behind the output and
down projections. All of them are launched on the step's stream and recorded in its graphs, of which
every rank replays the same: what a step launches follows from its plan alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.cache_kinds import KVCacheKind
from penstock.kernels.gpu.draw import draw
from penstock.kernels.gpu.sampler_memory import vocab_splits
from penstock.kernels.gpu.shard_draws import commit_shards, own_best
from penstock.protocol.sampling import GREEDY_TEMPERATURE
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import StepPlan, StepResult
from penstock.services.worker.gpu.batch_state import BatchState
from penstock.services.worker.gpu.chunk_rows import ChunkRows
from penstock.services.worker.gpu.compressed_layers import no_compression
from penstock.services.worker.gpu.decoder import GpuDecoder
from penstock.services.worker.gpu.executor import GpuExecutor, MakeDecoder
from penstock.services.worker.gpu.graphs import StepGraphs
from penstock.services.worker.gpu.in_flight import InFlight
from penstock.services.worker.gpu.rank_logprobs import RankLogprobs
from penstock.services.worker.gpu.sent import sent
from penstock.services.worker.gpu.stage_tokens import StageTokens
from penstock.services.worker.grammar_rows import NoGrammars
from penstock.services.worker.layer_groups import LayerGroups
from penstock.services.worker.memory import EXTRA_BLOCKS
from penstock.services.worker.models.dense import DenseConfig, DenseWeights
from penstock.services.worker.rank_group import Meeting, RankGroup, shard_of
from penstock.services.worker.slots import IntArray, PlannedStep


class WatchedRanks(RankGroup, Protocol):
    """Ranks of which one may be lost without an error in a step."""

    def meet(self, meeting: Meeting, like: Tensor | None = None) -> None:
        """See ``RankGroup``; like: rows [N, D] as they are summed."""

    def check(self) -> None:
        """Raises ``RuntimeError`` where what was computed may mean nothing."""

    def send_tokens(self, tokens: Tensor) -> None:
        """Of the last stage: give the first one what was drawn, [N] int32."""

    def receive_tokens(self, tokens: Tensor, free: torch.cuda.Event | None) -> Callable[[], None]:
        """See ``StageTokens``."""


class RankGpuDecoder(GpuDecoder):
    """A share of the layers, and the logits of this rank's tokens. ``draw`` looks for the best of
    these; only the bests go round, and every rank takes the best of them."""

    def __init__(
        self,
        config: DenseConfig,
        weights: DenseWeights,
        state: BatchState,
        num_blocks: int,
        block_size: int,
        max_positions: int,
        max_rows: int,
        ranks: RankGroup,
        grouped: LayerGroups,
        kind: KVCacheKind = "auto",
    ) -> None:
        """config: of this rank; grouped: this rank's layers in the groups of all; kind: of KV
        memory."""
        super().__init__(
            config, weights, state, num_blocks, block_size, max_positions, max_rows,
            grouped=grouped, kind=kind,
        )  # fmt: skip
        self._ranks, self._place = ranks, ranks.place
        self.vocab_size = ranks.vocab_size
        self.shard = shard_of(ranks)
        self.own_bests = torch.zeros(
            len(state.rows), 2, dtype=torch.int32, device=state.rows.device
        )
        """What this rank's tokens reach: see ``penstock.kernels.gpu.shard_draws``."""

    def _embed(self, tokens: Tensor, rows: int) -> None:
        residual = self.space.residual[:rows]
        if not self._place.is_first:
            self._ranks.take(residual)
            return
        state, table = self.state, self.weights.embedding
        tokens = tokens.clone()
        decoding = tokens[: len(state.rows)]
        latest = state.last_token.index_select(0, state.rows[: len(decoding)].clamp(min=0))
        decoding.copy_(torch.where(decoding < 0, latest, decoding))
        tokens -= self._place.share * len(table)
        others = (tokens < 0) | (tokens >= len(table))
        torch.index_select(table, 0, tokens.masked_fill_(others, 0), out=residual)
        residual.masked_fill_(others.unsqueeze(1), 0.0)
        self._ranks.sum(residual)
        if self._embedding_multiplier != 1.0:
            residual *= self._embedding_multiplier

    def body(
        self, rows: int, num_decode: int, chunks: ChunkRows | None, shared: bool = False
    ) -> None:
        super().body(rows, num_decode, chunks, shared)
        if not self._place.is_last:
            products = self.products_for(rows, mixed=chunks is not None)
            self._behind_attention(products, len(self.weights.layers) - 1, rows)
            self._ranks.hand_on(self.space.residual[:rows])

    def head(self, count: int) -> None:
        if self._place.is_last:
            super().head(count)

    def head_of_all(self, rows: int, count: int) -> None:
        if self._place.is_last:
            super().head_of_all(rows, count)

    @property
    def makes_logits(self) -> bool:
        return self._place.is_last

    def own_row_logits(self, first: int, count: int) -> Tensor:
        """``row_logits`` of this rank's tokens."""
        return super().row_logits(first, count)

    def row_logits(self, first: int, count: int) -> Tensor:
        """Of the last stage; on other ranks than the first perhaps anything."""
        return self._ranks.columns(self.own_row_logits(first, count))

    def draw(self, count: int) -> None:
        """The first of several stages gets its tokens otherwise, and those between need none: see
        ``StageTokens``. Theirs mean nothing here."""
        if not self._place.is_last:
            self.commit(count, 1)
            return
        self.draw_own(count, self.state.sample_slots)
        self.agree(count)

    def draw_own(self, count: int, rows: Tensor) -> None:
        """Find the bests of this rank. rows: int32, the slot of each row, -1: there is none."""
        space, state = self.space, self.state
        splits = draw(
            space.logits[:count], rows, state.temperature, state.seed_low, state.seed_high,
            state.num_output, space.best, space.token, GREEDY_TEMPERATURE, first=self.shard.first,
        )  # fmt: skip
        own_best(space.best, space.token, rows, count, splits, self.own_bests, self.shard.first)

    def agree(self, count: int) -> None:
        """Take the best of what all ranks have found, and advance the slots."""
        state = self.state
        commit_shards(
            self._ranks.gather(self.own_bests[:count]), state.sample_slots, state.last_token,
            state.position, state.num_output, self.space.result,
        )  # fmt: skip


class RankGpuExecutor(GpuExecutor):
    """Captures its graphs once the ranks have met: a graph holds the connections."""

    decoder: RankGpuDecoder

    def __init__(
        self,
        capacity: EngineSizes,
        device: torch.device,
        make_decoder: MakeDecoder,
        ranks: WatchedRanks,
    ) -> None:
        super().__init__(capacity, device, make_decoder)
        self._ranks, self._has_met = ranks, False
        place = ranks.place
        self._sends = place.is_last and not place.is_first
        self._coming: StageTokens | None = None
        if place.is_first and not place.is_last:
            self._coming = StageTokens(self._state, ranks)
        self.chunks.hands_on = not ranks.place.is_last
        if place.rank:
            self.grammars = NoGrammars(0, self.decoder.vocab_size)
        self._draws_whole = not place.rank
        vocab, rows = self.decoder.vocab_size, capacity.max_num_seqs if self._draws_whole else 0
        splits = rows * vocab_splits(vocab)
        with torch.inference_mode():
            self._best = torch.empty(splits, dtype=torch.float32, device=device)
            self._token = torch.empty(splits, dtype=torch.int32, device=device)
            self._logprobs = RankLogprobs(
                self.slots, self._state, self.decoder, self.sampler.space, self.decoder.shard
            )

    def warm_up(self) -> None:
        self.run_kernels()

    def meet(self, meeting: Meeting) -> None:
        """Once: behind ``reset`` nothing is under way that others could wait for."""
        if self._has_met:
            return
        self._has_met = True
        self._ranks.meet(meeting, self.decoder.space.residual)
        self.run_kernels_in_turn()
        if self._on_gpu:
            self.capture_graphs()

    def run_kernels_in_turn(self) -> None:
        """Launch every kernel once with the others, in an order that all have: NCCL connects at the
        first call of each kind, which no graph can hold."""
        with torch.inference_mode():
            self.decoder.draw(1)
            self.graphs.run_padding(self.capacity.max_num_seqs)
            if self._sends:
                self._ranks.send_tokens(self.decoder.space.result[0, :1])
            elif self._coming is not None:
                self._ranks.receive_tokens(torch.zeros_like(self._state.last_token[:1]), None)()

    def _run_choices(self, most: int) -> None:
        """Only the first rank draws rows whose logits it has whole."""
        if not self._draws_whole:
            return
        vocab, dtype = self.decoder.vocab_size, self.decoder.space.logits.dtype
        with torch.inference_mode():
            for rows in (1, most):
                logits = torch.zeros(rows, vocab, dtype=dtype, device=self._device)
                nobody = torch.full((rows,), -1, dtype=torch.int32, device=self._device)
                self._draw_gathered(logits, nobody, torch.arange(rows, device=self._device))
                self.sampler.note(logits, nobody)
                self.sampler.stages.warm_up(logits)

    def reset(self) -> None:
        super().reset()
        if self._coming is not None:
            self._coming.forget()

    def _launch(self, plan: StepPlan, step: PlannedStep, launched: float) -> InFlight:
        if self._coming is not None:
            self._coming.take(step.decoding)
        flight = super()._launch(plan, step, launched)
        rows = len(step.sampled)
        if rows and self._sends:
            self._ranks.send_tokens(self.decoder.space.result[0, :rows])
        elif rows and self._coming is not None:
            self._coming.expect(step.sampled)
        return flight

    def _chain_slots(self, step: PlannedStep) -> IntArray:
        return step.sampled[self.sampler.asking(step.sampled)]

    def _recall(self, graphs: StepGraphs, step: PlannedStep, padded: int) -> bool:
        return self._ranks.place.is_last and super()._recall(graphs, step, padded)

    def _choose(
        self, graphs: StepGraphs, step: PlannedStep, rows: int, openings: dict[int, int], made: bool
    ) -> None:
        """Rows that ask for more than a temperature are gathered, those alone, and rank 0 draws
        them; what it finds is its best, and the other ranks have none."""
        asking = np.flatnonzero(self.sampler.asking(step.sampled))
        if not len(asking) or not self._ranks.place.is_last:
            if made:
                self.decoder.draw(rows)
            else:
                graphs.run_head_and_draw(rows)
            return
        if not made:
            graphs.run_head(rows)
        at = sent(asking, self._device)
        slots = sent(step.sampled[asking].astype(np.int32), self._device)
        logits = self._ranks.columns(self.decoder.space.logits[:rows].index_select(0, at))
        others = self._state.sample_slots[:rows].index_fill(0, at, -1)
        self.decoder.draw_own(rows, others)
        if self._draws_whole:
            for row, token in openings.items():
                whole = logits[int(np.searchsorted(asking, row))]
                self.sampler.open(int(step.sampled[row]), token, whole)
            self._draw_gathered(logits, slots, at)
        self.decoder.agree(rows)
        if self._draws_whole:
            self.sampler.note(logits, slots)

    def _draw_gathered(self, logits: Tensor, slots: Tensor, at: Tensor) -> None:
        """Make the tokens of these rows the bests of this rank. logits: [n, V]; slots: [n] int32,
        of each row; at: [n] int64, the step's row of each."""
        splits = self.sampler.draw(logits, slots, self._best, self._token)
        own_best(
            self._best, self._token, slots, len(slots), splits, self.decoder.own_bests, index=at
        )

    def finished(self, wait: bool = False) -> StepResult | None:
        result = super().finished(wait)
        self._ranks.check()
        return result


def rank_executor(
    config: DenseConfig,
    weights: DenseWeights,
    capacity: EngineSizes,
    ranks: Any,
    grouped: LayerGroups,
    kind: KVCacheKind = "auto",
) -> RankGpuExecutor:
    """grouped, kind: see ``RankGpuDecoder``."""

    def make(state: BatchState, max_rows: int) -> RankGpuDecoder:
        return RankGpuDecoder(
            config, weights, state, capacity.num_blocks + EXTRA_BLOCKS, capacity.block_size,
            capacity.max_model_len, max_rows, ranks, grouped, kind,
        )  # fmt: skip

    executor = RankGpuExecutor(capacity, weights.embedding.device, make, ranks)
    executor.summary += f"; {no_compression('the layers are divided among ranks').summary}"
    return executor
