"""Makes one step: which sequences compute what, and which blocks they get for it.

The order within a step:

1. Sequences planned up to their length limit leave their slots.
2. Decode rows get the block that their next position needs; when there is none, the policy's
   victims are preempted until there is.
3. The token budget that the decode rows leave goes to prefill, while readers follow decoding
   sequences no more of it than they bear (``prefill_budget``): first to sequences in the middle of
   it, then to waiting ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.protocol.wire.messages.engine import StepShape
from penstock.protocol.wire.messages.requests import TOKEN_BYTES
from penstock.protocol.wire.messages.steps import Chunk, NewSlot
from penstock.services.scheduler.batch import RunningBatch
from penstock.services.scheduler.cache_shares import DEFAULT_SHARES, CacheShares
from penstock.services.scheduler.cached_prefixes import CachedPrefixes
from penstock.services.scheduler.head_room import HeadRoom
from penstock.services.scheduler.kv_cache import KVCache
from penstock.services.scheduler.kv_prefix import NOTHING, Prefix
from penstock.services.scheduler.limits import (
    BLOCK_BYTES,
    MOST_CHARACTER_BYTES,
    SLOT_BYTES,
    Limits,
)
from penstock.services.scheduler.planned_step import Step
from penstock.services.scheduler.policy import SchedulingPolicy
from penstock.services.scheduler.prefill_budget import LEAST_TOKENS, PrefillBudget
from penstock.services.scheduler.sequence import Request, Sequence
from penstock.services.scheduler.stats import Counters
from penstock.services.scheduler.waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from penstock.services.scheduler.kv_tier import KVTier

PLAN_BYTES = 8 * 1024 * 1024
"""A plan takes no further sequence in when it would be longer than this; the next one does. A plan
that takes in one is as long as that one needs, see ``MAX_SEQUENCE_TOKENS``. What comes beside
(blocks of chunks and of decode rows, slots that are gone) is less than a mebibyte. So a plan is
always far from the longest frame, and four of them on their way are no burden."""


class Planner:
    """Plans one step after another over the state that it shares with the core."""

    def __init__(
        self,
        limits: Limits,
        policy: SchedulingPolicy,
        enable_prefix_caching: bool,
        waiting: WaitingQueue,
        counters: Counters,
        prefill_budget: PrefillBudget,
        shape: StepShape,
        prefixes: CachedPrefixes | None = None,
        on_started: Callable[[Sequence], None] = lambda sequence: None,
        shares: CacheShares = DEFAULT_SHARES,
    ) -> None:
        """``on_started`` hears of each sequence that runs for the first time."""
        self.limits = limits
        self.kv = KVCache(
            limits.num_blocks,
            limits.block_size,
            enable_prefix_caching,
            limits.layer_groups,
            limits.max_num_batched_tokens,
            shares,
            counters,
        )
        self.batch = RunningBatch(limits, self.kv, prefixes)
        self.full_with = 0
        """Sequences that ran when KV memory was last found full; whoever reads it sets it to 0."""
        self.tier: KVTier | None = None
        """Where blocks are kept outside of KV memory; ``None``: nowhere."""
        self._stuck: list[Sequence] = []
        self._head_room = HeadRoom(self.kv)
        self._row_tokens = limits.max_row_tokens
        """Tokens that a row may bring, at most: as many positions are reserved for it."""
        self._row_blocks = self.kv.num_groups * self.kv.blocks_for(limits.max_row_tokens)
        self._in_turn = limits.micro_batches > 1
        """Micro-batches take turns."""
        self._whole = limits.task_prompts == "whole"
        """A prompt is computed in one step."""
        self._tasks_compute_all = limits.task_prompts != "chunks"
        self._policy = policy
        self._on_started = on_started
        self._caching = enable_prefix_caching
        self._waiting = waiting
        self._counters = counters
        self._prefill_budget = prefill_budget
        units = shape.row_units
        self._row_units = list(zip(units[::2], units[1::2], strict=True))

    def plan(self, number: int, now: float) -> Step | None:
        """Make step ``number``, or ``None`` when nothing can run."""
        step = Step(number, now)
        self._isolate_suspect()
        preempted = self._grow(step)
        self.kv.name_some()
        if self._in_turn:
            step.micro_batch, decoding = self.batch.next_micro_batch()
        else:
            decoding = self.batch.decoding
        step.num_decoding = len(decoding)
        step.budget = self._budget(decoding)
        sampled: list[Sequence] = []
        for sequence in self.batch.prefilling if len(decoding) < len(self.batch) else ():
            self._add_chunk(step, sampled, sequence)
        if preempted:
            self.full_with = len(self.batch)
        elif len(self._waiting):
            self._admit(step, sampled)
        if not decoding and not step.chunks:
            self.kv.name_some(1)
            if len(self.batch):
                self._preempt_one()  # prefills that wait for each other's blocks
            return None
        if decoding:
            self._policy.on_decode(decoding)
        each = self._row_tokens
        for sequence in decoding:
            sequence.num_computed += each
            sequence.in_flight += 1
        for sequence in sampled:
            sequence.num_computed += each - 1
            sequence.in_flight += 1
            self.batch.start_decoding(sequence)
            if sequence.request.retain:
                self._retain(sequence, now)
        step.rows = [*decoding, *sampled]
        return step

    def _budget(self, decoding: list[Sequence]) -> int:
        """Positions of prefill that a step may carry beside its decode rows: where time bounds it,
        so many that large steps have a whole number of the device's ``row_units``."""
        rows = len(decoding)  # of one token each: a step with prefill has no drafts
        left = self.limits.max_num_batched_tokens - rows
        waiting = len(self._waiting) + len(self.batch) - len(self.batch.decoding)
        if not waiting or not any(sequence.request.head.streamed for sequence in decoding):
            return left
        bound = self._prefill_budget.most_tokens(len(decoding), waiting)
        if bound is None or bound >= left:
            return left
        for least, unit in self._row_units:
            whole = round((rows + bound) / unit) * unit
            if whole >= least:
                # Rounded down it may leave nothing beside many decode rows, in every step.
                return min(left, whole - rows) if whole - rows >= LEAST_TOKENS else bound
        return bound

    def take_stuck(self) -> list[Sequence]:
        """Sequences that had the engine for themselves and could not grow: to be ended."""
        stuck, self._stuck = self._stuck, []
        return stuck

    def _preempt(self, sequence: Sequence) -> None:
        """Take slot and blocks from a running sequence; it computes its tokens anew later."""
        self._counters.preemptions += 1
        sequence.preemptions += 1
        self.batch.release(sequence)
        sequence.resumed = True
        self._waiting.push(sequence)
        if self.tier is not None:
            self.tier.preempted(sequence)

    def _isolate_suspect(self) -> None:
        """Clear the batch when a suspect waits: it runs with nothing else beside it."""
        if self._waiting.has_suspect and not self.batch.lone_suspect:
            for sequence in list(self.batch.sequences.values()):
                self._preempt(sequence)

    def _grow(self, step: Step) -> bool:
        """Release what is planned up to its length limit, whose last tokens are in flight, and give
        blocks to each decode row at a block boundary. Returns whether it preempted."""
        due = [s for s in self.batch.decoding if s.num_computed >= s.due]
        if not due:
            return False
        kv, kept, preempted = self.kv, list[Sequence](), False
        for sequence in due:
            if self._row_tokens > 1:
                kv.advance(sequence.kv, len(sequence.tokens) - 1)
                kept.append(sequence)
            elif sequence.num_computed + 1 >= sequence.max_len:
                self.batch.release(sequence)
            else:
                kv.advance(sequence.kv, sequence.num_computed)
                kept.append(sequence)
        growing = [(sequence, self._reach(sequence)) for sequence in kept]
        while sum(kv.lacks(one.kv, reach) for one, reach in growing) > kv.num_available:
            preempted = True
            self._preempt_one()
            growing = [(one, reach) for one, reach in growing if one.running]
        for sequence, reach in growing:
            for block in kv.grow(sequence.kv, reach):
                step.grown += (sequence.slot, block)
            self.batch.set_due(sequence)
        return preempted

    def _reach(self, sequence: Sequence) -> int:
        """Positions that the tables of a decoding sequence must reach to in this step: of all
        tokens that rows may have brought by then, and of what the next one may bring."""
        return min(sequence.num_computed + self._row_tokens, sequence.max_len - 1)

    def _preempt_one(self) -> None:
        if len(self.batch) > 1 or self.kv.held_aside:
            self._preempt(self._policy.victim(self.batch.sequences.values()))
        else:
            # Limits.max_sequence_len rules this out; a plan that never comes would hang a client.
            (sequence,) = self.batch.sequences.values()
            self.batch.release(sequence)
            self._stuck.append(sequence)

    def _admit(self, step: Step, sampled: list[Sequence]) -> None:
        """Start waiting sequences in order, as long as slots, blocks, budget and the plan's bytes
        last.

        A prefill that does not end in this step has taken the whole budget. So whoever starts
        after it, such as the siblings of a request's first choice, finds its prompt cached.
        """
        if self.batch.lone_suspect:
            return
        owed = self._owed()
        while step.budget > 0 and self.batch.has_free_slot and len(self._waiting):
            if owed >= self.kv.num_available:
                self.full_with = len(self.batch)
                return  # before anyone's prefix is looked up in vain
            sequence = self._waiting.first()
            if sequence.in_flight or (sequence.suspect and len(self.batch)):
                return
            adapters = self.batch.adapters
            if adapters is not None and not adapters.admits(sequence, step.now):
                continue
            if self._whole and len(sequence.tokens) > step.budget:
                return
            if not self._head_room.may_fit(sequence.kv, owed):
                self.full_with = len(self.batch)
                return
            hits = self._hits(sequence)
            if not self._head_room.fits(sequence.kv, hits, owed):
                self.full_with = len(self.batch)
                return
            if self.tier is not None and self.tier.fetches(sequence, hits, step.now):
                owed = self._owed()
                continue
            size = self._added_bytes(step, sequence, hits)
            if step.added and step.added_bytes + size > PLAN_BYTES:
                return
            step.added_bytes += size
            self._waiting.remove(sequence)
            self._start(step, sampled, sequence, hits)
            owed += self._row_blocks if sequence.decoding else self.kv.owed(sequence.kv)
            if sequence.suspect:
                return

    def _retain(self, sequence: Sequence, now: float) -> None:
        """The prompt of a request is planned: its choices share what it asks to retain of that."""
        request = sequence.request
        if request.retained or not self._caching:
            return
        request.retained = True
        for span in request.retain:
            names = self.kv.retain(sequence.kv, span.tokens, span.seconds, now)
            if self.tier is not None:
                self.tier.want(names)

    def _owed(self) -> int:
        """Blocks that running sequences and loads will ask for soon."""
        owed = self._row_blocks * len(self.batch.decoding)
        owed += sum(self.kv.owed(sequence.kv) for sequence in self.batch.prefilling)
        return owed if self.tier is None else owed + self.tier.owed

    def make_holder(self, sequence: Sequence) -> None:
        """Let a sequence that is to wait here hold KV memory of this epoch later."""
        request = sequence.request
        sequence.kv = self.kv.new_holder(sequence.tokens, request.root, request.head.tenant)
        request.retained = False

    def num_hits(self, sequence: Sequence) -> int:
        """Positions that a sequence would not have to compute if it started now."""
        return self._hits(sequence).length * self.limits.block_size

    def _hits(self, sequence: Sequence) -> Prefix:
        """What of the prefix cache a sequence can start with."""
        request = sequence.request
        anew = sequence.wants_prompt or (request.has_task and self._tasks_compute_all)
        anew |= request.reads_logits and sequence.num_output > 0
        return NOTHING if anew else self.kv.match(sequence.kv)

    @staticmethod
    def _sent_from(sequence: Sequence, num_computed: int) -> int:
        """Position from which on the worker needs the tokens of a sequence with adjustments. What
        is computed already matters to nothing else."""
        return min(num_computed, sequence.prompt_len)

    def _reads_output(self, request: Request) -> bool:
        """Whether the worker needs the whole output."""
        return request.reads_output or (self._row_tokens > 1 and bool(request.corpus))

    def _shares_prompt(self, request: Request, start: int) -> bool:
        """Whether the worker needs a whole prompt, of which tokens from ``start`` on are sent."""
        drafts = self._row_tokens > 1 and bool(request.corpus)
        return start > 0 and (request.reads_prompt or drafts)

    def _added_bytes(self, step: Step, sequence: Sequence, hits: Prefix) -> int:
        """Bytes by which a plan grows when it takes a sequence in, at most."""
        request = sequence.request
        start = hits.length * self.limits.block_size
        size = SLOT_BYTES + len(sequence.sampling) + MOST_CHARACTER_BYTES * len(request.head.task)
        size += 2 + len(request.trace)
        size += BLOCK_BYTES * hits.length * self.kv.num_groups
        if self._reads_output(request):
            start = self._sent_from(sequence, start)
            if self._shares_prompt(request, start) and not step.holds_prompt(request):
                size += TOKEN_BYTES * sequence.prompt_len
        return size + TOKEN_BYTES * (len(sequence.tokens) - start)

    def _start(self, step: Step, sampled: list[Sequence], sequence: Sequence, hits: Prefix) -> None:
        """Give a waiting sequence a slot, its hits and a first chunk."""
        self.kv.begin(sequence.kv, hits)
        self.batch.admit(sequence)
        if self.tier is not None and hits.length:
            self.tier.want(sequence.kv.digests[: hits.length])
        sequence.num_computed = sequence.num_hits = hits.length * self.limits.block_size
        if self._caching:
            self._counters.prefix_query_tokens += len(sequence.tokens)
            self._counters.prefix_hit_tokens += sequence.num_hits
        if sequence.cached_tokens < 0:
            shown = sequence.num_hits - sequence.request.head.virtual_tokens
            sequence.cached_tokens = min(max(shown, 0), sequence.shown_prompt_len)
            sequence.started_at = step.now
            sequence.queued_s = max(0.0, step.now - sequence.request.arrival)
            self._on_started(sequence)
        start, prompt = sequence.num_computed, -1
        if self._reads_output(sequence.request):
            start = self._sent_from(sequence, start)
            if self._shares_prompt(sequence.request, start):
                prompt = step.share_prompt(sequence)
        step.added.append(
            NewSlot(
                slot=sequence.slot,
                tokens=sequence.tokens[start:].tobytes(),
                prompt_len=sequence.prompt_len,
                num_computed=sequence.num_computed,
                blocks=hits.flat(),
                sampling=sequence.sampling,
                choice=sequence.choice,
                prompt_logprobs=(sequence.prompt_logprobs.most if sequence.wants_prompt else None),
                start=start,
                prompt=prompt,
                task=sequence.request.head.task if sequence.request.has_task else "",
                second=sequence.second,
                adapter=sequence.request.head.adapter,
                trace=sequence.request.trace,
                most=sequence.max_len if self._row_tokens > 1 else 0,
                corpus=sequence.request.corpus if self._row_tokens > 1 else b"",
                virtual_tokens=sequence.request.head.virtual_tokens,
            )
        )
        self._add_chunk(step, sampled, sequence)

    def _add_chunk(self, step: Step, sampled: list[Sequence], sequence: Sequence) -> None:
        """Plan as many of a sequence's known tokens as budget and free blocks allow.

        A prefill that gets none waits for decode rows to end.
        """
        start, known = sequence.num_computed, len(sequence.tokens)
        self.kv.advance(sequence.kv, start)
        end = min(known, start + step.budget, self.kv.room(sequence.kv))
        if end <= start:
            return
        blocks = self.kv.grow(sequence.kv, end)
        sequence.num_computed = end
        step.budget -= end - start
        step.chunks.append(Chunk(sequence.slot, start, end - start, end == known, blocks))
        if sequence.wants_prompt:
            step.prompts[sequence.slot] = sequence
        self.kv.name_chunk(sequence.kv, start, end, step.number)
        (sampled if end == known else step.members).append(sequence)
        if end > sequence.num_served:
            self._policy.on_prefill(sequence, end - max(start, sequence.num_served))
