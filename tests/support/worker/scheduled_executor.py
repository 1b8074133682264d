"""Requests through the scheduler's own core to an executor, in one process: prefix cache,
preemption and all, without a message."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from penstock.protocol.logprobs import PackedLogprobs
from penstock.protocol.prefix_digest import chain_root, extended
from penstock.protocol.wire.messages.requests import ChoiceState, RequestHead, TokenWork
from penstock.protocol.wire.messages.steps import SlotSampling, StepResult
from penstock.protocol.wire.messages.tokens import EndReason, TokenBatch
from penstock.services.scheduler.core import SchedulerCore
from penstock.services.scheduler.limits import Limits
from penstock.services.scheduler.policy_choice import make_policy
from penstock.services.scheduler.stats import Counters
from penstock.services.worker.executor import Executor

PATIENCE = 60.0
"""Seconds for a grammar to be compiled in."""


@dataclass
class Outputs:
    """Of all requests, by their number; of logprobs also by the index of the output token."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, EndReason] = field(default_factory=dict)
    logprobs: dict[tuple[int, int], PackedLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, PackedLogprobs] = field(default_factory=dict)

    def take(self, batch: TokenBatch) -> None:
        tokens = np.frombuffer(batch.tokens, "<i4").tolist()
        for number, count in zip(batch.ids, batch.counts, strict=True):
            self.tokens.setdefault(number, []).extend(tokens[:count])
            del tokens[:count]
        for found in batch.logprobs:
            number = batch.ids[found.row]
            if found.tokens is not None:
                self.logprobs[number, batch.indices[found.row]] = found.tokens
            if found.prompt is not None:
                self.prompt_logprobs[number] = found.prompt
        for end in batch.ends:
            self.ends[batch.ids[end.row]] = end.reason


def work(
    prompt: list[int],
    sampling: SlotSampling,
    max_tokens: int,
    *,
    stop_ids: list[int] | None = None,
    prompt_logprobs: int | None = None,
) -> TokenWork:
    """A request as the tokenizer sends it."""
    head, ids = RequestHead(), np.array(prompt, "<i4").tobytes()
    adjustments = sampling.adjustments
    return TokenWork(
        head,
        ids,
        sampling.packed(),
        [ChoiceState(0, b"")],
        stop_ids or [],
        max_tokens,
        prompt_logprobs,
        reads_output=adjustments is not None,
        reads_prompt=adjustments is not None and adjustments.reads_prompt,
        prefix=extended(b"", chain_root(head), ids),
    )


def new_core(executor: Executor) -> SchedulerCore:
    return SchedulerCore(Limits.of(executor.capacity), 1, make_policy("fcfs"), True, 100)


def _finished(executor: Executor) -> StepResult:
    result = executor.finished(wait=True)
    assert result is not None
    return result


def scheduled(
    executor: Executor,
    works: list[TokenWork],
    core: SchedulerCore | None = None,
) -> tuple[Outputs, Counters]:
    """All requests, asked at once, and what the scheduler has counted. core: one that has answered
    others before, whose prefixes are cached; its steps are launched ahead of results."""
    ahead = core is not None
    core = core or new_core(executor)
    outputs, answers = Outputs(), deque[StepResult]()
    for number, one in enumerate(works):
        assert core.add(number, 0, "a test", one, 0.0) is None
    deadline = time.monotonic() + PATIENCE
    while core.stats().open_requests:
        assert time.monotonic() < deadline, core.stats()
        now = time.monotonic()
        while (plan := core.plan(now)) is not None:
            executor.launch(plan)
            if not ahead:
                answers.append(_finished(executor))
        if ahead and executor.in_flight:
            answers.append(_finished(executor))
        batches = core.apply(answers.popleft(), now) if answers else core.expire(now)
        for _, batch in batches:
            outputs.take(batch)
    assert core.stats().blocks_used == 0
    return outputs, core.counters
