"""Makes one step: which sequences compute what, and which blocks they get for it.

The order within a step:

1. Sequences planned up to their length limit leave their slots.
2. Decode rows get the block that their next position needs; when there is none, the policy's
   victims are preempted until there is.
3. The token budget that the decode rows leave goes to prefill, while readers follow decoding
   sequences no more of it than they bear (``prefill_pace``): first to sequences in the middle of
   it, then to waiting ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.protocol.wire.messages.engine import StepShape
from penstock.protocol.wire.messages.steps import Chunk, NewSlot
from penstock.services.scheduler.batch import RunningBatch
from penstock.services.scheduler.block_hash import BlockHasher
from penstock.services.scheduler.block_manager import BlockManager
from penstock.services.scheduler.limits import BLOCK_BYTES, SLOT_BYTES, TOKEN_BYTES, Limits
from penstock.services.scheduler.policy import SchedulingPolicy
from penstock.services.scheduler.prefill_pace import LEAST_TOKENS, PrefillPace
from penstock.services.scheduler.sequence import Request, Sequence
from penstock.services.scheduler.stats import Counters
from penstock.services.scheduler.waiting_queue import WaitingQueue

PLAN_BYTES = 8 * 1024 * 1024
"""A plan takes no further sequence in when it would be longer than this; the next one does. A plan
that takes in one is as long as that one needs, see ``MAX_SEQUENCE_TOKENS``. What comes beside
(blocks of chunks and of decode rows, slots that are gone) is less than a mebibyte. So a plan is
always far from the longest frame, and four of them on their way are no burden."""


@dataclass(slots=True)
class Step:
    """A planned step: what its plan says, and what is kept to read its result."""

    number: int
    now: float = 0.0
    """When it is planned, in the scheduler's monotonic seconds."""
    budget: int = 0
    """Positions that may still be added."""
    added: list[NewSlot] = field(default_factory=list)
    grown: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    rows: list[Sequence | None] = field(default_factory=list)
    """In the order of ``StepResult.tokens``; ``None`` where nobody waits for the token."""
    num_decoding: int = 0
    """Rows that decode."""
    least_seconds: float = 0.0
    """That it takes at least."""
    members: list[Sequence] = field(default_factory=list)
    """Prefilling sequences that compute in this step and have no row."""
    prompts: dict[int, Sequence] = field(default_factory=dict)
    """By slot: those whose chunk brings logprobs of their prompt."""
    added_bytes: int = 0
    """Of ``added`` and ``shared_prompts`` in the plan, at most."""
    shared_prompts: list[bytes] = field(default_factory=list)
    """Prompts that entries of ``added`` point into."""
    _shared: dict[int, int] = field(default_factory=dict)
    """Places in ``shared_prompts`` by request."""

    @property
    def num_prefilled(self) -> int:
        """Positions of prefill."""
        return sum(chunk.count for chunk in self.chunks)

    def sequences(self) -> list[Sequence]:
        """All that compute in this step."""
        return [*(s for s in self.rows if s is not None), *self.members]

    def holds_prompt(self, request: Request) -> bool:
        """Whether the plan brings the prompt in ``shared_prompts``."""
        return request.id in self._shared

    def share_prompt(self, sequence: Sequence) -> int:
        """The place of a sequence's prompt in ``shared_prompts``."""
        place = self._shared.setdefault(sequence.request.id, len(self.shared_prompts))
        if place == len(self.shared_prompts):
            self.shared_prompts.append(sequence.tokens[: sequence.prompt_len].tobytes())
        return place


class _Unfit(NamedTuple):
    """A head of the queue that had no room."""

    sequence: Sequence
    num_tokens: int
    held: int
    """Blocks of its cached prefix that others held: it need not take them from the free ones."""


class Planner:
    """Plans one step after another over the state that it shares with the core."""

    def __init__(
        self,
        limits: Limits,
        policy: SchedulingPolicy,
        enable_prefix_caching: bool,
        waiting: WaitingQueue,
        counters: Counters,
        pace: PrefillPace,
        shape: StepShape,
    ) -> None:
        self.limits = limits
        self.blocks = BlockManager(limits.num_blocks)
        self.batch = RunningBatch(limits, self.blocks)
        self.full_with = 0
        """Sequences that ran when KV memory was last found full; whoever reads it sets it to 0."""
        self._stuck: list[Sequence] = []
        self._unfit: _Unfit | None = None
        self._hasher = BlockHasher(limits.block_size)
        self._policy = policy
        self._caching = enable_prefix_caching
        self._waiting = waiting
        self._counters = counters
        self._pace = pace
        units = shape.row_units
        self._row_units = list(zip(units[::2], units[1::2], strict=True))

    def plan(self, number: int, now: float) -> Step | None:
        """Make step ``number``, or ``None`` when nothing can run."""
        step = Step(number, now)
        self._isolate_suspect()
        self._retire()
        preempted = self._grow(step)
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
            if len(self.batch):
                self._preempt_one()  # prefills that wait for each other's blocks
            return None
        if decoding:
            self._policy.on_decode(decoding)
        for sequence in decoding:
            sequence.num_computed += 1
            sequence.in_flight += 1
        for sequence in sampled:
            sequence.in_flight += 1
            self.batch.start_decoding(sequence)
        step.rows = [*decoding, *sampled]
        return step

    def _budget(self, decoding: list[Sequence]) -> int:
        """Positions of prefill that a step may carry beside its decode rows: where time bounds it,
        so many that large steps have a whole number of the device's ``row_units``."""
        rows = len(decoding)
        left = self.limits.max_num_batched_tokens - rows
        waiting = len(self._waiting) + len(self.batch) - rows
        if not waiting or not any(sequence.request.streamed for sequence in decoding):
            return left
        bound = self._pace.most_tokens(rows, waiting)
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
        self.batch.release(sequence)
        sequence.resumed = True
        self._waiting.push(sequence)

    def _isolate_suspect(self) -> None:
        """Clear the batch when a suspect waits: it runs with nothing else beside it."""
        if self._waiting.has_suspect and not self.batch.lone_suspect:
            for sequence in list(self.batch.sequences.values()):
                self._preempt(sequence)

    def _retire(self) -> None:
        """Release what is planned up to its length limit: its last tokens are in flight."""
        for sequence in self.batch.decoding:
            if sequence.num_computed + 1 >= sequence.max_len:
                self.batch.release(sequence)

    def _grow(self, step: Step) -> bool:
        """Give a block to each decode row at a block boundary. Returns whether it preempted."""
        growing = [s for s in self.batch.decoding if s.num_computed == s.capacity]
        preempted = False
        while len(growing) > self.blocks.num_available:
            preempted = True
            self._preempt_one()
            growing = [s for s in growing if s.running]
        if growing:
            for sequence, block in zip(growing, self.blocks.allocate(len(growing)), strict=True):
                self.batch.extend(sequence, [block])
                step.grown += (sequence.slot, block)
        return preempted

    def _preempt_one(self) -> None:
        if len(self.batch) > 1:
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
        owed = sum(map(self._owed, self.batch.sequences.values()))
        while step.budget > 0 and self.batch.has_free_slot and len(self._waiting):
            if owed >= self.blocks.num_available:
                self.full_with = len(self.batch)
                return  # before anyone's prefix is looked up in vain
            sequence = self._waiting.first()
            if sequence.in_flight or (sequence.suspect and len(self.batch)):
                return
            if not self._may_fit(sequence, owed):
                self.full_with = len(self.batch)
                return
            hits = self._hits(sequence)
            if not self._fits(sequence, hits, owed):
                self.full_with = len(self.batch)
                return
            size = self._added_bytes(step, sequence, hits)
            if step.added and step.added_bytes + size > PLAN_BYTES:
                return
            step.added_bytes += size
            self._waiting.remove(sequence)
            self._start(step, sampled, sequence, hits)
            owed += self._owed(sequence)
            if sequence.suspect:
                return

    def num_hits(self, sequence: Sequence) -> int:
        """Positions that a sequence would not have to compute if it started now."""
        return len(self._hits(sequence)) * self.limits.block_size

    def _hits(self, sequence: Sequence) -> list[int]:
        """Blocks of the prefix cache that a sequence can start with.

        The block of the last known token is left out: its K and V may be there, but the logits
        that the next token is drawn from are not.
        """
        if not self._caching or sequence.wants_prompt:
            return []
        count = (len(sequence.tokens) - 1) // self.limits.block_size
        return self.blocks.match(self._hasher.extend(sequence, count)[:count])

    def _owed(self, sequence: Sequence) -> int:
        """Blocks that a running sequence will ask for soon: its known tokens and one more."""
        if sequence.decoding:
            return 1
        needed = self.limits.blocks_for(len(sequence.tokens) + 1)
        return max(1, needed - len(sequence.blocks))

    def _fits(self, sequence: Sequence, hits: list[int], owed: int) -> bool:
        """Whether there is room for all known tokens beside what running sequences need soon.

        Nothing is reserved by it. It only keeps a newcomer from taking blocks that its elders
        would take back by preemption a moment later.
        """
        held = len(hits) - self.blocks.num_unheld(hits)
        if self._has_room(sequence, held, owed):
            self._unfit = None
            return True
        self._unfit = _Unfit(sequence, len(sequence.tokens), held)
        self.blocks.watch(sequence.hashes)
        return False

    def _has_room(self, sequence: Sequence, held: int, owed: int) -> bool:
        """``held``: blocks of its prefix that it shares with those who hold them."""
        needed = self.limits.blocks_for(len(sequence.tokens) + 1) - held
        return needed + owed <= self.blocks.num_available

    def _may_fit(self, sequence: Sequence, owed: int) -> bool:
        """Whether a head of the queue that had no room is worth another look: its prefix of 120,000
        tokens is not matched anew at every plan while it waits.

        What others hold of its prefix has not grown since, if nobody has taken a block out of the
        cache and none of its chain has become known. So with too few blocks free it has no room.
        """
        unfit = self._unfit
        if unfit is None or unfit.sequence is not sequence or not self.blocks.watch_passed:
            return True
        if unfit.num_tokens != len(sequence.tokens):
            return True
        return self._has_room(sequence, unfit.held, owed)

    @staticmethod
    def _sent_from(sequence: Sequence, num_computed: int) -> int:
        """Position from which on the worker needs the tokens of a sequence with adjustments. What
        is computed already matters to nothing else."""
        return min(num_computed, sequence.prompt_len)

    @staticmethod
    def _shares_prompt(sequence: Sequence, start: int) -> bool:
        """Whether the worker needs a whole prompt, of which tokens from ``start`` on are sent."""
        adjustments = sequence.sampling.adjustments
        return start > 0 and adjustments is not None and adjustments.reads_prompt

    def _added_bytes(self, step: Step, sequence: Sequence, hits: list[int]) -> int:
        """Bytes by which a plan grows when it takes a sequence in, at most."""
        request = sequence.request
        start = len(hits) * self.limits.block_size
        size = SLOT_BYTES + request.sampling_bytes + BLOCK_BYTES * len(hits)
        if sequence.sampling.adjustments is not None:
            start = self._sent_from(sequence, start)
            if self._shares_prompt(sequence, start) and not step.holds_prompt(request):
                size += TOKEN_BYTES * sequence.prompt_len
        return size + TOKEN_BYTES * (len(sequence.tokens) - start)

    def _start(
        self, step: Step, sampled: list[Sequence], sequence: Sequence, hits: list[int]
    ) -> None:
        """Give a waiting sequence a slot, its hits and a first chunk."""
        self.blocks.hold(hits)
        self.batch.admit(sequence)
        self.batch.extend(sequence, hits)
        sequence.num_computed = sequence.num_hits = len(hits) * self.limits.block_size
        if self._caching:
            self._counters.prefix_query_tokens += len(sequence.tokens)
            self._counters.prefix_hit_tokens += sequence.num_hits
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = min(sequence.num_hits, sequence.prompt_len)
            sequence.queued_s = max(0.0, step.now - sequence.request.arrival)
        start, prompt = sequence.num_computed, -1
        if sequence.sampling.adjustments is not None:
            start = self._sent_from(sequence, start)
            if self._shares_prompt(sequence, start):
                prompt = step.share_prompt(sequence)
        step.added.append(
            NewSlot(
                slot=sequence.slot,
                tokens=sequence.tokens[start:].tobytes(),
                prompt_len=sequence.prompt_len,
                num_computed=sequence.num_computed,
                blocks=hits,
                sampling=sequence.sampling,
                prompt_logprobs=(sequence.prompt_logprobs.most if sequence.wants_prompt else None),
                start=start,
                prompt=prompt,
            )
        )
        self._add_chunk(step, sampled, sequence)

    def _add_chunk(self, step: Step, sampled: list[Sequence], sequence: Sequence) -> None:
        """Plan as many of a sequence's known tokens as budget and free blocks allow.

        A prefill that gets none waits for decode rows to end.
        """
        start, known = sequence.num_computed, len(sequence.tokens)
        room = sequence.capacity + self.blocks.num_available * self.limits.block_size
        end = min(known, start + step.budget, room)
        if end <= start:
            return
        missing = max(self.limits.blocks_for(end) - len(sequence.blocks), 0)
        blocks = self.blocks.allocate(missing)
        self.batch.extend(sequence, blocks)
        sequence.num_computed = end
        step.budget -= end - start
        step.chunks.append(Chunk(sequence.slot, start, end - start, end == known, blocks))
        if sequence.wants_prompt:
            step.prompts[sequence.slot] = sequence
        if self._caching:
            self._cache_prefill(step.number, sequence, start, end)
        (sampled if end == known else step.members).append(sequence)
        if end > sequence.num_served:
            self._policy.on_prefill(sequence, end - max(start, sequence.num_served))

    def _cache_prefill(self, number: int, sequence: Sequence, start: int, end: int) -> None:
        """Let the blocks that a chunk completes be found, from this step on."""
        size = self.limits.block_size
        full = end // size
        hashes = self._hasher.extend(sequence, full)
        for index in range(start // size, full):
            self.blocks.cache(sequence.blocks[index], hashes[index], number)
        # The token at this count is drawn by the step that completes the block before it.
        sequence.cache_at = (full + 1) * size + 1

    def cache_generated(self, sequence: Sequence, number: int) -> None:
        """Let a block of generated tokens be found; step ``number`` completed it."""
        size = self.limits.block_size
        index = (sequence.cache_at - 1) // size - 1
        hashes = self._hasher.extend(sequence, index + 1)
        self.blocks.cache(sequence.blocks[index], hashes[index], number)
        sequence.cache_at += size
