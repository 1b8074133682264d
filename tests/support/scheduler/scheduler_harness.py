"""An engine for tests: the scheduler's core, a simulated worker, and owners that check each row."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from support.scheduler.simulated_worker import (
    SimulatedWorker,
    output_alone,
    token_bytes,
    token_list,
)

from penstock.protocol.prefix_digest import chain_root, extended
from penstock.protocol.wire.messages.cache_hints import RetainedSpan
from penstock.protocol.wire.messages.engine import StepShape
from penstock.protocol.wire.messages.requests import (
    ChoiceState,
    Rejected,
    RequestHead,
    TokenWork,
)
from penstock.protocol.wire.messages.steps import SlotSampling, StepFailed, StepPlan, StepResult
from penstock.protocol.wire.messages.tokens import End, EndReason, TokenBatch
from penstock.services.scheduler.admission import Offers
from penstock.services.scheduler.cache_shares import DEFAULT_SHARES, CacheShares
from penstock.services.scheduler.core import Batches, SchedulerCore
from penstock.services.scheduler.limits import Limits
from penstock.services.scheduler.policy import SchedulingPolicy
from penstock.services.scheduler.policy_choice import make_policy
from penstock.services.scheduler.sequence import Sequence

ROOMY = Limits(
    num_blocks=256,
    block_size=4,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=200,
    vocab_size=1000,
)


def small(**changes: int) -> Limits:
    """Limits of a small engine."""
    sizes = {
        "num_blocks": 16,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 60,
        "vocab_size": 100,
    }
    return Limits(**{**sizes, **changes})


def prompt(length: int, start: int = 0) -> list[int]:
    """Tokens that count up from ``start``."""
    return [(start + i) % 97 for i in range(length)]


def token_work(
    prompt: list[int],
    max_tokens: int | None = 8,
    outputs: dict[int, list[int]] | None = None,
    n: int = 1,
    stop_ids: list[int] | None = None,
    seed: int = 0,
    time_left: float | None = None,
    age: float = 0.0,
    tenant: str = "",
    priority: int = 0,
    cache_salt: str = "",
    accepted: bool = False,
    stalls: int = 0,
    streamed: bool = True,
    prompt_logprobs: int | None = None,
    adapter: str = "",
    retain: list[RetainedSpan] | None = None,
    release: bool = False,
    virtual: int = 0,
) -> TokenWork:
    """A request as the tokenizer sends it; ``outputs`` by choice for a continuation."""
    states = outputs if outputs is not None else {choice: [] for choice in range(n)}
    head = RequestHead(
        tenant=tenant,
        priority=priority,
        cache_salt=cache_salt,
        time_left=time_left,
        age=age,
        streamed=streamed,
        accepted=accepted,
        adapter=adapter or ("soft" if virtual else ""),
        virtual_tokens=virtual,
    )
    ids = token_bytes(prompt)
    return TokenWork(
        head=head,
        prompt=ids,
        sampling=SlotSampling(1.0, 0, 1.0, seed & (2**64 - 1)).packed(),
        choices=[ChoiceState(choice, token_bytes(output)) for choice, output in states.items()],
        stop_ids=stop_ids or [],
        max_tokens=2**31 if max_tokens is None else max_tokens,
        prompt_logprobs=prompt_logprobs,
        stalls=stalls,
        prefix=extended(b"", chain_root(head), ids),
        retain=retain or [],
        release=release,
    )


@dataclass
class Stream:
    """One choice as its owner sees it."""

    prompt: list[int]
    """The virtual tokens ahead of it included."""
    expected: list[int]
    attempt: int
    owner: str
    virtual: int = 0
    received: list[int] = field(default_factory=list)
    end: End | None = None
    cached: int | None = None
    queued_s: float | None = None
    cancelled: bool = False

    @property
    def open(self) -> bool:
        return self.end is None and not self.cancelled


class Engine:
    """Plans are executed in order at once; their answers wait until ``deliver``."""

    def __init__(
        self,
        limits: Limits = ROOMY,
        policy: str | SchedulingPolicy = "fcfs",
        caching: bool = True,
        max_waiting: int = 10_000,
        max_in_flight: int = 2,
        poison: int = -1,
        not_a_number: int = -1,
        max_waiting_tokens: int | None = None,
        shape: StepShape = StepShape(),  # noqa: B008 - it is frozen
        row_count: Callable[[], int] | None = None,
        num_ranks: int = 1,
        offers: Offers | None = None,
        shares: CacheShares = DEFAULT_SHARES,
    ) -> None:
        """``row_count``: how many tokens a row brings."""
        self.limits = limits
        self.poison = poison
        self.not_a_number = not_a_number
        chosen = make_policy(policy) if isinstance(policy, str) else policy
        self.core = SchedulerCore(
            limits,
            1,
            chosen,
            caching,
            max_waiting,
            max_in_flight,
            max_waiting_tokens=max_waiting_tokens,
            shape=shape,
            num_ranks=num_ranks,
            offers=offers,
            shares=shares,
        )
        self.worker = SimulatedWorker(limits, 1, poison, not_a_number, row_count=row_count)
        self.now = 0.0
        self.answers: deque[StepResult | StepFailed] = deque()
        self.streams: dict[tuple[int, int], Stream] = {}
        self.plans: list[StepPlan] = []
        self.started: list[int] = []
        """Request of every slot that a plan has added, in order."""

    # What owners do.

    def submit(
        self,
        request_id: int,
        prompt: list[int],
        max_tokens: int | None = 8,
        outputs: dict[int, list[int]] | None = None,
        attempt: int = 0,
        owner: str = "tokenizer",
        priority: int = 0,
        cache_salt: str = "",
        n: int = 1,
        stop_ids: list[int] | None = None,
        seed: int = 0,
        time_left: float | None = None,
        age: float = 0.0,
        tenant: str = "",
        accepted: bool = False,
        stalls: int = 0,
        streamed: bool = True,
        prompt_logprobs: int | None = None,
        adapter: str = "",
        retain: list[RetainedSpan] | None = None,
        release: bool = False,
        virtual: int = 0,
    ) -> Rejected | None:
        work = token_work(
            prompt, max_tokens, outputs, n, stop_ids, seed, time_left, age,
            tenant, priority, cache_salt, accepted, stalls, streamed, prompt_logprobs,
            adapter, retain, release, virtual,
        )  # fmt: skip
        vocab = self.limits.vocab_size
        prompt = [*range(vocab, vocab + virtual), *prompt]
        rejected = self.core.add(request_id, attempt, owner, work, self.now)
        self.core.check()
        if rejected is None:
            limit = min(self.limits.max_model_len, self.limits.kv_tokens)
            if max_tokens is not None:
                limit = min(limit, len(prompt) + max_tokens)
            for state in work.choices:
                sampling = SlotSampling(1.0, 0, 1.0, seed)
                self.streams[request_id, state.choice] = Stream(
                    prompt=prompt,
                    expected=output_alone(
                        prompt,
                        sampling,
                        state.choice,
                        stop_ids or [],
                        limit,
                        self.limits.vocab_size,
                    ),
                    attempt=attempt,
                    owner=owner,
                    virtual=virtual,
                    received=token_list(state.output),
                )
        return rejected

    def run_alone(self, work: TokenWork, request_id: int = 1) -> None:
        """Compute a request to its end, whatever its tokens are."""
        assert self.core.add(request_id, 0, "alone", work, self.now) is None
        while (plan := self.core.plan(self.now)) is not None:
            answer = self.worker.execute(plan)
            if isinstance(answer, StepFailed):
                self.core.fail(answer, self.now)
            elif answer is not None:
                self.core.apply(answer, self.now)

    def cancel(self, request_id: int, choice: int = -1) -> bool:
        streams = [s for (i, c), s in self.streams.items() if i == request_id and choice in (c, -1)]
        attempt = max((s.attempt for s in streams), default=0)
        dropped = self.core.cancel(request_id, attempt, None, choice)
        for stream in streams:
            if stream.open:
                stream.cancelled = True
        self.core.check()
        return dropped

    # The step loop.

    def plan(self) -> StepPlan | None:
        plan = self.core.plan(self.now)
        self.core.check()
        if plan is not None:
            self.plans.append(plan)
            running = {s.slot: s for s in self.core._planner.batch.sequences.values()}
            self.started += [running[new.slot].request.id for new in plan.added]
            whole = {new.slot: running[new.slot].tokens.tolist() for new in plan.added}
            answer = self.worker.execute(plan, whole)
            if answer is not None:
                self.answers.append(answer)
            self._require_room(running)
        return plan

    def _require_room(self, running: dict[int, Sequence]) -> None:
        """Whatever the results will be, each decode row had blocks for all that it may bring."""
        for slot, sequence in running.items():
            state = self.worker.slots.get(slot)
            if sequence.decoding and state is not None and state.began >= 0:
                most = min(state.began + self.limits.max_row_tokens, sequence.max_len - 1)
                assert len(state.blocks) * self.limits.block_size >= most, "a row lacks blocks"

    def deliver(self) -> None:
        """Hand the oldest answer to the scheduler."""
        answer = self.answers.popleft()
        if isinstance(answer, StepFailed):
            self.take(self.core.fail(answer, self.now))
        else:
            self.take(self.core.apply(answer, self.now))
        self.core.check()

    def step(self) -> None:
        """Plan as far ahead as allowed, then take one answer."""
        while self.plan() is not None:
            pass
        if self.answers:
            self.deliver()

    def run(self, steps: int = 5000) -> None:
        """Run until nothing is left to do."""
        for _ in range(steps):
            self.step()
            if not self.answers:
                if self.plan() is None:
                    if held := self.core.held_for(self.now):
                        self.now += held
                        continue
                    self.take(self.core.expire(self.now))
                    return
                continue
        raise AssertionError(f"not done after {steps} steps: {self.core.stats()}")

    def restart(self, limits: Limits | None = None, offers: Offers | None = None) -> None:
        """The worker is replaced; what the old one still had under way comes back late."""
        self.limits = limits or self.limits
        epoch = self.core.epoch + 1
        self.worker = SimulatedWorker(
            self.limits, epoch, self.poison, self.not_a_number,
            token_seconds=self.worker.token_seconds, is_early=self.worker.is_early,
            row_count=self.worker.row_count,
        )  # fmt: skip
        self.take(self.core.restart(epoch, limits, offers))
        self.core.check()

    def expire(self) -> None:
        self.take(self.core.expire(self.now))
        self.core.check()

    # What owners see.

    def take(self, batches: Batches) -> None:
        owners = [owner for owner, _ in batches]
        assert len(dict.fromkeys(owners)) == len(owners), "two batches for one owner"
        for owner, batch in batches:
            self._take_batch(owner, batch)

    def _take_batch(self, owner: str, batch: TokenBatch) -> None:
        ends = {end.row: end for end in batch.ends}
        assert len(ends) == len(batch.ends)
        starts = {start.row: start for start in batch.starts}
        assert len(starts) == len(batch.starts)
        columns = (batch.ids, batch.choices, batch.attempts, batch.indices, batch.counts)
        tokens, start = token_list(batch.tokens), 0
        assert len(tokens) == sum(batch.counts)
        for row, values in enumerate(zip(*columns, strict=True)):
            request_id, choice, attempt, index, count = values
            stream = self.streams[request_id, choice]
            if stream.cancelled or attempt < stream.attempt:
                assert count == 0, "tokens for a request that was cancelled"
                continue
            assert stream.end is None, "a row after the end"
            assert (owner, attempt) == (stream.owner, stream.attempt)
            assert index == len(stream.received), "a gap or a token twice"
            if (begun := starts.get(row)) is not None:
                assert index == 0
                stream.cached, stream.queued_s = begun.cached, begun.queued_s
            stream.received += tokens[start : start + count]
            assert stream.received == stream.expected[: len(stream.received)], "wrong tokens"
            start += count
            stream.end = ends.get(row)

    def tokens(self, request_id: int, choice: int = 0) -> list[int]:
        return self.streams[request_id, choice].received

    def end(self, request_id: int, choice: int = 0) -> End:
        end = self.streams[request_id, choice].end
        assert end is not None, f"request {request_id} choice {choice} has not ended"
        return end

    def assert_finished(self, request_id: int, choice: int = 0) -> None:
        """The choice has all tokens that it has when computed alone, and the right end."""
        stream = self.streams[request_id, choice]
        end = self.end(request_id, choice)
        assert end.reason in (EndReason.STOP, EndReason.LENGTH), end
        assert stream.received == stream.expected
        if end.reason is EndReason.STOP:
            assert end.stop == stream.received[-1]

    def assert_idle(self) -> None:
        """Nothing waits or runs; all blocks are free or cached."""
        self.core.check()
        stats = self.core.stats()
        assert (stats.running, stats.waiting, stats.open_requests) == (0, 0, 0), stats
        assert stats.blocks_used == 0
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
        assert not self.core.owners()
