"""Executes step plans with a real model, on the CPU or on a CUDA device."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from penstock.kernels.attention import KV_TILE
from penstock.kernels.cache_kinds import KVCacheKind
from penstock.kernels.exact_attention import ROW_MULTIPLE
from penstock.kernels.linear import PACKED_ROW_MINIMUM
from penstock.kernels.quantized_cache import cache_type
from penstock.kernels.sampling import (
    Adjustment,
    AllowedTokens,
    Choice,
    Logprobs,
    SamplingRows,
    choose,
    model_logprob,
)
from penstock.kernels.sampling.logprobs import logprobs
from penstock.protocol.sampling import GREEDY_TEMPERATURE
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import (
    ChunkLogprobs,
    RowFailure,
    SampledLogprobs,
    StepPlan,
    StepResult,
)
from penstock.services.worker.adjustments import SlotAdjuster
from penstock.services.worker.cpu_threads import StepThreads, ThreadChoice, ThreadReview
from penstock.services.worker.drawn_rows import Drawn, causes
from penstock.services.worker.executor import DirectExecutor
from penstock.services.worker.grammar_rows import GrammarRows, Masks, only
from penstock.services.worker.kv_memory import KVMemory, MemoryBlocks
from penstock.services.worker.layer_groups import LayerGroups, group_layers
from penstock.services.worker.memory import EXTRA_BLOCKS
from penstock.services.worker.models.causal_model import CausalModel
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.placement import placement
from penstock.services.worker.plain_attention import REFERENCE, AnyAttention
from penstock.services.worker.pooling import pool_rows
from penstock.services.worker.prompt_sums import PromptSums, chunk_rows
from penstock.services.worker.slots import IntArray, PlannedChunk, PlannedStep, SlotTable
from penstock.services.worker.step_inputs import InputBuilder, RowPadding, attended_caches
from penstock.services.worker.step_logprobs import (
    Words,
    asking_chunks,
    asking_rows,
    chunk_logprobs,
    pack_entries,
    row_logprobs,
)

MANY_ROWS = 32
"""Steps with so many rows of prefill have as many threads as prefill is fastest with."""
PROMPT_ROWS = 64
"""Rows of a prompt whose logits are in memory at once."""


class Hidden(NamedTuple):
    residual: torch.Tensor
    """[N, hidden]: what the layers leave of some rows or all."""
    sampled: torch.Tensor | None
    """Which of them logits are made of to draw from; ``None``: all."""


class ModelExecutor(DirectExecutor):
    """A decoder, its KV memory and its slots.

    In fp32 on the CPU a step has as many rows as give a row of a matrix product the same bits in
    every step: two or more with packed weights, else a multiple of ``ROW_MULTIPLE`` (oneMKL as
    ``set_up_cpu_libraries`` sets it; measured with 1 to 16 threads). With the kernels' own
    guarantees a sequence's logits are then the same bits whatever the batch, the chunks and the
    cache.
    """

    def __init__(
        self,
        model: CausalModel,
        capacity: EngineSizes,
        attention: AnyAttention = REFERENCE,
        kind: KVCacheKind = "auto",
    ) -> None:
        """Takes KV memory for ``capacity.num_blocks`` blocks and ``EXTRA_BLOCKS`` more: one that
        padding rows write to, and one that is never written and stands for "no block". kind: of
        that memory."""
        super().__init__()
        self.capacity, self.kind = capacity, kind
        self.device, self.dtype = placement(model.device, model.dtype)
        self.summary = ""
        self.threads: StepThreads | None = None
        """CPU threads that a step uses; ``None``: as many as torch was told."""
        self.review: ThreadReview[ThreadChoice] | None = None
        """Looks at ``threads`` again; ``None``: nobody does."""
        self._model = model
        with torch.inference_mode():
            model.prepare(capacity.max_model_len)
        exact = model.dtype == torch.float32 and model.device.type == "cpu"
        padding_block, empty_block = capacity.num_blocks, capacity.num_blocks + 1
        self.slots = SlotTable(capacity, KV_TILE // capacity.block_size, empty_block)
        if isinstance(model, Decoder) and model.adapters is not None:
            self.slots.adapter_numbers = model.adapters.numbers
        self.grammars = GrammarRows(capacity.max_num_seqs, model.vocab_size)
        self._adjuster = SlotAdjuster(capacity.max_num_seqs, model.vocab_size, model.device)
        blocks = capacity.num_blocks + EXTRA_BLOCKS
        grouped = self._grouped()
        if capacity.groups != grouped.groups:
            raise ValueError("the capacity is not that of the model's groups of layers")
        caches, of_layers = attended_caches(
            model.caches, grouped, attention, blocks, capacity.block_size, model.dtype, exact=exact
        )
        rows = self._exact_rows() if exact else RowPadding(1, 1, model.packed)
        with torch.inference_mode():
            self._memory = KVMemory(
                model.caches, grouped, blocks, capacity.block_size,
                cache_type(kind, model.dtype), model.device,
            )  # fmt: skip
        if model.device.type == "cpu" and not capacity.groups:
            self.kv_blocks = MemoryBlocks(self._memory, len(capacity.groups))
        self._inputs = InputBuilder(
            self.slots, caches, of_layers, self._memory.layers, rows, padding_block, model.device
        )
        self._finite_keys = attention.finite_keys
        self.sums: PromptSums | None = None
        """Tasks get a state of all positions of their prompt; ``None``: the last one's."""

    def _grouped(self) -> LayerGroups:
        return group_layers(self._model.caches)

    def _exact_rows(self) -> RowPadding:
        """The numbers of rows with which products give a row the same bits in every step."""
        packed = self._model.packed
        return RowPadding(1, PACKED_ROW_MINIMUM, packed) if packed else RowPadding(ROW_MULTIPLE, 1)

    def prepare(self) -> None:
        self.grammars.prepare()

    def improve(self, now: float, pause: float) -> bool:
        if self.review is None:
            return False
        more = self.review.go_on(now, pause)
        if not more and self.threads != self.review.choice.threads:
            self.threads, self.summary = self.review.choice.threads, str(self.review.choice)
        return more

    def _set_threads(self, step: PlannedStep) -> None:
        """Each thread that calls torch has a number of its own: it is asked for, not remembered."""
        if self.threads is None:
            return
        many = sum(len(chunk.tokens) for chunk in step.chunks) >= MANY_ROWS
        wanted = self.threads.prefill if many else self.threads.decode
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)
        if self.review is not None:
            self.review.used()

    def reset(self) -> None:
        super().reset()
        self.slots.reset()

    def execute(self, plan: StepPlan) -> StepResult:
        begun = time.perf_counter()
        try:
            with torch.inference_mode():
                step = self.slots.apply(plan)
                self._adjuster.begin(plan.added, self.slots.adjustments, plan.prompts)
                self.grammars.begin(plan.added, self.slots.adjustments)
                if self.slots.blocks.fresh:
                    self._memory.clear(self.slots.blocks.fresh, keys=self._finite_keys)
                if self.sums is not None:
                    self.sums.begin(self.slots.added)
                return self._compute(plan, step, begun)
        except BaseException:
            self.grammars.drop()
            self.slots.reset()
            raise

    def _compute(self, plan: StepPlan, step: PlannedStep, begun: float) -> StepResult:
        """The step of a plan that the slots have taken; begun: when, by ``perf_counter``."""
        self._start_masks(step)
        hidden = self.hidden(step)
        self._sum_up(step, hidden)
        self._recall(step, hidden)
        tokens, bad, logprobs, failures = self._choose(step, hidden)
        not_finite, banned = causes(bad)
        states = partial(self._states, step, hidden)
        named, count = self.slots.task_rows(step), len(step.sampled)
        pooled, undone = pool_rows(named, count, self.tasks, states, generates=self.generates)
        failures = [*failures, *self.slots.unreadable_rows(step), *undone]
        prompts = [self._prompt(hidden, *one) for one in asking_chunks(step)]
        self.slots.finish(step, tokens)
        seconds = time.perf_counter() - begun
        return StepResult(
            plan.epoch, plan.step, tokens.astype("<i4").tobytes(), not_finite, seconds, logprobs,
            prompts, failures, banned, pooled=pooled,
        )  # fmt: skip

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Logits [rows, vocab] of a plan's rows, nothing drawn; ``reset`` comes next."""
        with torch.inference_mode():
            step = self.slots.apply(plan)
            return self.row_logits(step, self.hidden(step))[: len(step.sampled)]

    def hidden(self, step: PlannedStep) -> Hidden:
        """The layers; all rows' residual stream where a prompt's logprobs are asked for."""
        if not len(step.decoding) and not step.chunks:
            return Hidden(torch.empty(0), None)
        self._set_threads(step)
        inputs = self._inputs.build(step)
        if _needs_all(step) or (self.sums is not None and self.slots.task_chunks(step)):
            return Hidden(self._model.hidden(inputs, None), inputs.sampled)
        return Hidden(self._model.hidden(inputs, inputs.sampled), None)

    def row_logits(self, step: PlannedStep, hidden: Hidden) -> torch.Tensor:
        """Logits [rows, vocab]: ``step.sampled`` first, then perhaps padding rows."""
        return self._model.logits(hidden.residual, hidden.sampled)

    def _sum_up(self, step: PlannedStep, hidden: Hidden) -> None:
        """Add the chunks of this step to what has come of their prompts."""
        if self.sums is None:
            return
        chosen = self.slots.task_chunks(step)
        for first, chunk in chunk_rows(step):
            if chunk.slot in chosen:
                rows = torch.arange(first, first + len(chunk.tokens), device=hidden.residual.device)
                self.sums.add(chunk, self._model.last_hidden(hidden.residual, rows))

    def _states(
        self, step: PlannedStep, hidden: Hidden, rows: list[int]
    ) -> npt.NDArray[np.float32]:
        """[len(rows), hidden]: of the prompts that end in rows of the step's result."""
        if self.sums is not None:
            return self.sums.states(step.sampled[rows].tolist())
        at = torch.tensor(rows, device=hidden.residual.device)
        if hidden.sampled is not None:
            at = hidden.sampled.index_select(0, at)
        states: npt.NDArray[np.float32] = (
            self._model.last_hidden(hidden.residual, at).float().cpu().numpy()
        )
        return states

    def _prompt(self, hidden: Hidden, first: int, chunk: PlannedChunk) -> ChunkLogprobs:
        """Logprobs of the prompt's tokens that a chunk's rows, from ``first`` on, predict."""
        most = int(self.slots.prompt_logprobs[chunk.slot])
        parts = []
        for begin in range(0, len(chunk.predicted), PROMPT_ROWS):
            tokens = chunk.predicted[begin : begin + PROMPT_ROWS]
            rows = self._inputs.chosen_rows(first + begin + np.arange(len(tokens)))
            logits = self._model.logits(hidden.residual, rows)[: len(tokens)]
            parts.append(self._entries(logits, tokens.astype(np.int64), most))
        return chunk_logprobs(chunk, np.concatenate(parts), most)

    def _choose(
        self, step: PlannedStep, hidden: Hidden
    ) -> tuple[npt.NDArray[np.int32], IntArray, list[SampledLogprobs], list[RowFailure]]:
        """The sampled token of each row, why rows have none (``Choice.bad``), logprobs, and the
        rows whose grammar has failed."""
        rows = len(step.sampled)
        if not rows or not self.generates:
            return np.zeros(rows, np.int32), np.zeros(rows, np.int64), [], []
        logits = self.row_logits(step, hidden)[:rows]
        drawn = self._draw(logits, step.sampled, 0, self.grammars.wait)
        self._took(logits, drawn)
        failures = [] if drawn.masks is None else drawn.masks.failures
        entries = self._logprobs(logits, drawn.at, drawn.tokens)
        return drawn.tokens.astype(np.int32), drawn.bad, entries, failures

    def _draw(
        self,
        logits: torch.Tensor,
        at: IntArray,
        ahead: IntArray | int,
        masks_of: Callable[[], Masks | None],
    ) -> Drawn:
        """Draw a token for each row. logits: [R, V]; at: [R] slots; ahead: tokens that this step
        has brought before each row's; masks_of: brings what grammars allow, while all else is
        prepared."""  # fmt: skip
        slots = self.slots
        temperature = slots.temperature[at]
        num_output = slots.num_output[at].astype(np.int64) + ahead
        greedy = bool((temperature < GREEDY_TEMPERATURE).all())
        keys = np.zeros(len(at), np.uint64) if greedy else slots.keys(at, num_output)
        wanted = SamplingRows(temperature, slots.top_k[at], slots.top_p[at], keys, slots.min_p[at])
        adjustments = self._adjuster.adjustments(at, num_output, keys)
        masks = masks_of()
        if masks is not None:
            self._open(masks, logits)
            allowed = torch.from_numpy(masks.masks).to(logits.device)
            adjustments.insert(0, AllowedTokens(masks.rows, allowed))
        choice = self._choice(logits, wanted, adjustments)
        # The one wait for the device.
        both = torch.stack((choice.tokens, choice.bad.to(torch.int64))).cpu().numpy()
        return Drawn(at, num_output, both[0], both[1], masks)

    def _choice(
        self, logits: torch.Tensor, wanted: SamplingRows, adjustments: list[Adjustment]
    ) -> Choice:
        return choose(logits, wanted, GREEDY_TEMPERATURE, adjustments)

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of all tokens, of rows of ``row_logits``."""
        return logits

    def _took(self, logits: torch.Tensor, drawn: Drawn) -> None:
        """Show the drawn tokens to what reads them. logits: [R, V], as the model made them."""
        at, num_output, tokens, _, masks = drawn
        self._adjuster.took(at, tokens, num_output)
        self._steer(logits, at, tokens)
        if masks is not None:
            self.grammars.took(at[masks.rows], tokens[masks.rows])

    def _steer(self, logits: torch.Tensor, at: IntArray, tokens: IntArray) -> None:
        """Show Mirostat the drawn tokens. logits: [R, V], as the model made them."""
        steered = self._adjuster.steered
        rows = np.flatnonzero(steered.asks[at])
        if not len(rows):
            return
        whole = self._whole(logits.index_select(0, torch.from_numpy(rows).to(logits.device)))
        for z, row in zip(whole, rows.tolist(), strict=True):
            steered.took(int(at[row]), [model_logprob(z, int(tokens[row]))])

    def _recall(self, step: PlannedStep, hidden: Hidden) -> None:
        """Show Mirostat the output of sequences that take a slot again."""
        for first, chunk in chunk_rows(step):
            for begin in range(0, len(chunk.drawn), PROMPT_ROWS):
                tokens = chunk.drawn[begin : begin + PROMPT_ROWS].tolist()
                at = first + chunk.drawn_from + begin
                rows = self._inputs.chosen_rows(at + np.arange(len(tokens)))
                logits = self._whole(self._model.logits(hidden.residual, rows)[: len(tokens)])
                found = (model_logprob(*one) for one in zip(logits, tokens, strict=True))
                self._adjuster.steered.took(chunk.slot, found)

    def _open(self, masks: Masks, logits: torch.Tensor) -> None:
        """Let rows begin with the token that opens a thinking where it is the likeliest of all."""
        rows = np.array(list(masks.openings), np.int64)
        if not len(rows):
            return
        likeliest = self._likeliest(
            logits.index_select(0, torch.from_numpy(rows).to(logits.device))
        )
        for (row, token), found in zip(masks.openings.items(), likeliest.tolist(), strict=True):
            if found == token:
                at = int(np.searchsorted(masks.rows, row))
                masks.masks[at] = only(token, masks.masks.shape[1])

    def _likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """[R]: the likeliest token of each row. logits: [R, V]."""
        return logits.argmax(-1)

    def _start_masks(self, step: PlannedStep) -> None:
        """What grammars allow is found out while the layers are computed."""
        rows = self.grammars.following(step.sampled)
        if len(rows):
            self.grammars.start(step.sampled, rows)

    def _logprobs(
        self, logits: torch.Tensor, at: IntArray, tokens: IntArray
    ) -> list[SampledLogprobs]:
        """Logprobs of the rows that ask. logits: [R, V]; at: [R] slots; tokens: [R] chosen."""
        rows = asking_rows(self.slots, at)
        if not len(rows):
            return []
        most = self.slots.logprobs[at[rows]]
        asked = logits.index_select(0, torch.from_numpy(rows).to(logits.device))
        return row_logprobs(self._entries(asked, tokens[rows], int(most.max())), rows, most)

    def _entries(self, logits: torch.Tensor, tokens: IntArray, most: int) -> Words:
        """[R, 3 + 2 N] of all rows of ``logits`` [R, V]; tokens: [R], those whose logprob is
        wanted."""
        found = self._logprobs_of(logits, torch.from_numpy(tokens).to(logits.device), most)
        chosen, rank, top_ids, top = (part.cpu().numpy() for part in found)
        return pack_entries(tokens, rank, chosen, top_ids, top)

    def _logprobs_of(self, logits: torch.Tensor, tokens: torch.Tensor, most: int) -> Logprobs:
        return logprobs(logits, tokens, most)


def _needs_all(step: PlannedStep) -> bool:
    """Whether logits of other rows than those that are drawn are needed."""
    return bool(asking_chunks(step)) or any(len(chunk.drawn) for chunk in step.chunks)
