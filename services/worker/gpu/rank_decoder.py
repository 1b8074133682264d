"""One rank of several that share a model, on a CUDA device.

Its layers are the same kernels over its share, with sums across the ranks behind the output and
down projections. All of them are launched on the step's stream and recorded in its graphs, of which
every rank replays the same: what a step launches follows from its plan alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.cache_kinds import KVCacheKind
from penstock.kernels.gpu.draw import draw
from penstock.kernels.gpu.shard_draws import commit_shards, own_best
from penstock.protocol.sampling import GREEDY_TEMPERATURE
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import StepPlan, StepResult
from penstock.services.worker.gpu.batch_state import BatchState
from penstock.services.worker.gpu.decoder import GpuDecoder
from penstock.services.worker.gpu.drafted_rows import StepRows
from penstock.services.worker.gpu.executor import GpuExecutor, MakeDecoder
from penstock.services.worker.gpu.graphs import StepGraphs
from penstock.services.worker.gpu.in_flight import InFlight
from penstock.services.worker.gpu.rank_logprobs import RankLogprobs
from penstock.services.worker.gpu.stage_tokens import StageTokens
from penstock.services.worker.grammar_rows import NoGrammars
from penstock.services.worker.layer_groups import LayerGroups
from penstock.services.worker.models.dense import DenseConfig, DenseWeights
from penstock.services.worker.rank_group import Meeting, RankGroup, shard_of
from penstock.services.worker.slots import PlannedStep


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
        self, rows: int, num_decode: int, chunks: StepRows | None, shared: bool = False
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

    def row_logits(self, first: int, count: int) -> Tensor:
        """Of the last stage; on other ranks than the first perhaps anything."""
        return self.whole(super().row_logits(first, count))

    def whole(self, logits: Tensor) -> Tensor:
        """[N, V]: logits [N, own tokens] of all ranks, gathered; see ``RankGroup.columns``."""
        return self._ranks.columns(logits)

    def draw(self, count: int) -> None:
        """The first of several stages gets its tokens otherwise, and those between need none: see
        ``StageTokens``. Theirs mean nothing here."""
        if not self._place.is_last:
            self.commit(count, 1)
            return
        if self._place.shares == 1:
            super().draw(count)
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
        if place.shares > 1:
            self._logprobs = RankLogprobs(self.slots, self._state, self.decoder, self.sampler.space)

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

    def _run_choices(self, most: int) -> None:
        if self._ranks.place.is_last:
            super()._run_choices(most)

    def _recall(self, graphs: StepGraphs, step: PlannedStep, padded: int) -> bool:
        return self._ranks.place.is_last and super()._recall(graphs, step, padded)

    def _choose(
        self, graphs: StepGraphs, step: PlannedStep, rows: int, openings: dict[int, int], made: bool
    ) -> None:
        if self._ranks.place.is_last:
            super()._choose(graphs, step, rows, openings, made)
        elif made:
            self.decoder.draw(rows)
        else:
            graphs.run_head_and_draw(rows)

    def finished(self, wait: bool = False) -> StepResult | None:
        result = super().finished(wait)
        self._ranks.check()
        return result
