"""Compare scheduling policies on a recorded trace: the real scheduler, a clock that is computed.

    python -m penstock.loadtest.studies.simulate_policies [--policy NAME]... [--trace FILE] [--json]

Requests come as in the trace, ``SchedulerCore`` plans, and a step takes

    seconds = a + b * prefill tokens + c * decode rows      (``StepTime``)

after which its tokens are there and the next plan starts, as in the real loop with two plans on
their way, the second made when the scheduler wants to. So all that differs between two rows of the
table is the policy, and a run takes seconds.
What the model leaves out: attention's cost grows with the context, the scheduler's own time is not
counted, and no prompt shares a prefix with another.
"""

from __future__ import annotations

import argparse
import sys
from array import array
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from penstock.loadtest.studies.policy_trace import RECORDED, TraceRequest, read
from penstock.protocol.config import ConfigError
from penstock.protocol.wire.messages.requests import ChoiceState, RequestHead, TokenWork
from penstock.protocol.wire.messages.steps import SlotSampling, StepPlan, StepResult
from penstock.services.scheduler.core import Batches, SchedulerCore
from penstock.services.scheduler.limits import Limits
from penstock.services.scheduler.policy import SchedulingPolicy
from penstock.services.scheduler.policy_choice import POLICIES, make_policy

STOP, OTHER = 0, 1
"""The two tokens that the simulated model says."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step. The constants are those of a model with some ten billion weights in 16
    bits on one GPU of the larger kind, rounded: weights read once a step, 10 000 prompt tokens a
    second, and a little for each row."""

    base: float = 12e-3
    prefill_token: float = 0.1e-3
    decode_row: float = 0.1e-3

    def of(self, prefill_tokens: int, decode_rows: int) -> float:
        return self.base + self.prefill_token * prefill_tokens + self.decode_row * decode_rows

    def alone(self, request: TraceRequest, limits: Limits) -> float:
        """Seconds that a request takes in an empty engine: its slowdown is measured against it."""
        chunks = -(-request.prompt // limits.max_num_batched_tokens)
        prefill = self.base * chunks + self.prefill_token * request.prompt
        return prefill + (request.output - 1) * self.of(0, 1)


ENGINE = Limits(
    num_blocks=1200,
    block_size=16,
    max_num_seqs=48,
    max_num_batched_tokens=2048,
    max_model_len=4096,
    vocab_size=2,
)
"""KV memory for 19 200 tokens: little enough that sequences are preempted now and then."""


@dataclass(slots=True)
class Times:
    """When what happened to one request, in seconds of the simulated clock."""

    started: float = -1.0
    """Its first chunk began to run."""
    first_token: float = -1.0
    ended: float = -1.0


@dataclass(slots=True)
class _Slot:
    request: int
    produced: int
    decoding: bool = False


class TimedWorker:
    """Executes plans: knows how long each takes and when each answer is complete."""

    def __init__(self, trace: list[TraceRequest], step_time: StepTime) -> None:
        self._trace = trace
        self._step_time = step_time
        self._slots: dict[int, _Slot] = {}

    def execute(self, plan: StepPlan) -> tuple[StepResult, list[int]]:
        """The answer, with its seconds, and the requests that the plan added."""
        for gone in plan.gone:
            del self._slots[gone]
        added = []
        for new in plan.added:
            sampling = msgspec.msgpack.decode(new.sampling, type=SlotSampling)
            request = sampling.seed  # the simulation's seeds number the requests
            self._slots[new.slot] = _Slot(request, new.length - new.prompt_len)
            added.append(request)
        rows = [slot for _, slot in sorted(self._slots.items()) if slot.decoding]
        seconds = self._step_time.of(sum(chunk.count for chunk in plan.chunks), len(rows))
        rows += [self._slots[chunk.slot] for chunk in plan.chunks if chunk.sample]
        tokens = array("i")
        for slot in rows:
            slot.decoding = True
            slot.produced += 1
            tokens.append(STOP if slot.produced == self._trace[slot.request].output else OTHER)
        return StepResult(plan.epoch, plan.step, tokens.tobytes(), [], seconds), added


@dataclass(slots=True)
class Report:
    """What one policy made of a trace. Times in seconds."""

    policy: str
    requests: int
    mean_ttft: float
    median_ttft: float
    p99_ttft: float
    mean_e2e: float
    slowdown: dict[str, float]
    """Mean over a tenant's requests of their time over their time in an empty engine."""
    tenant_ttft: dict[str, float]
    """Mean time to the first token by tenant."""
    max_wait: float
    """Longest time between a request's arrival and its first chunk."""
    throughput: float
    """Output tokens a second while requests waited; 0 when none ever did."""
    preemptions: int
    times: list[Times] = field(repr=False)
    """In the order of the trace."""


class Simulation:
    """One policy and one trace, which is sorted by arrival."""

    def __init__(
        self,
        trace: list[TraceRequest],
        policy: SchedulingPolicy,
        limits: Limits = ENGINE,
        step_time: StepTime | None = None,
    ) -> None:
        self.limits = limits
        self.step_time = step_time or StepTime()
        self.times = [Times() for _ in trace]
        self.now = 0.0
        self._crowded_seconds = 0.0
        """Seconds of the steps that ran while requests waited; the next field has their tokens."""
        self._crowded_tokens = 0
        self._trace = trace
        self._policy = policy
        self._core = SchedulerCore(limits, 1, policy, False, len(trace) + 1)
        self._worker = TimedWorker(trace, self.step_time)
        self._planned: deque[StepPlan] = deque()
        self._next = 0
        """The request that comes next."""

    def run(self) -> Report:
        """Play the trace to its end. Raises ``ValueError`` for a request that does not fit."""
        while True:
            self._arrivals()
            self._plan_ahead()
            if self._planned:
                self._step(self._planned.popleft())
            elif self._next < len(self._trace):
                self.now = self._trace[self._next].arrival
            else:
                return self._report()

    def _plan_ahead(self) -> None:
        while (plan := self._core.plan(self.now)) is not None:
            self._planned.append(plan)

    def _step(self, plan: StepPlan) -> None:
        result, added = self._worker.execute(plan)
        for request in added:
            times = self.times[request]
            times.started = self.now if times.started < 0 else times.started
        if self._core.stats().waiting:
            self._crowded_seconds += result.seconds
            self._crowded_tokens += len(result.tokens) // 4
        ends = self.now + result.seconds
        while held := self._core.held_for(self.now):
            if self.now + held >= ends:
                break
            self.now += held
            self._arrivals()
            self._plan_ahead()
        self.now = ends
        self._arrivals()
        self._note(self._core.apply(result, self.now))

    def _arrivals(self) -> None:
        trace = self._trace
        while self._next < len(trace) and trace[self._next].arrival <= self.now:
            request = trace[self._next]
            work = _token_work(request, self._next, self.now - request.arrival)
            rejected = self._core.add(self._next, 0, "simulation", work, self.now)
            if rejected is not None:
                raise ValueError(f"request {self._next} of the trace: {rejected.message}")
            self._next += 1

    def _note(self, batches: Batches) -> None:
        for _, batch in batches:
            for request, index in zip(batch.ids, batch.indices, strict=True):
                if index == 0:
                    self.times[request].first_token = self.now
            for end in batch.ends:
                self.times[batch.ids[end.row]].ended = self.now

    def _report(self) -> Report:
        trace, times = self._trace, self.times
        ttft = [t.first_token - r.arrival for r, t in zip(trace, times, strict=True)]
        e2e = [t.ended - r.arrival for r, t in zip(trace, times, strict=True)]
        slow = [
            seconds / self.step_time.alone(request, self.limits)
            for request, seconds in zip(trace, e2e, strict=True)
        ]
        return Report(
            policy=self._policy.name,
            requests=len(trace),
            mean_ttft=float(np.mean(ttft)),
            median_ttft=float(np.median(ttft)),
            p99_ttft=float(np.percentile(ttft, 99)),
            mean_e2e=float(np.mean(e2e)),
            slowdown=_by_tenant(trace, slow),
            tenant_ttft=_by_tenant(trace, ttft),
            max_wait=max(t.started - r.arrival for r, t in zip(trace, times, strict=True)),
            throughput=self._crowded_tokens / max(self._crowded_seconds, 1e-9),
            preemptions=self._core.stats().counters.preemptions,
            times=times,
        )


def _by_tenant(trace: list[TraceRequest], values: list[float]) -> dict[str, float]:
    tenants = sorted(dict.fromkeys(request.tenant for request in trace))
    return {
        tenant: float(
            np.mean([v for r, v in zip(trace, values, strict=True) if r.tenant == tenant])
        )
        for tenant in tenants
    }


def _token_work(request: TraceRequest, number: int, age: float) -> TokenWork:
    return TokenWork(
        head=RequestHead(tenant=request.tenant, age=age, priority=request.priority),
        prompt=array("i", [OTHER] * request.prompt).tobytes(),
        sampling=SlotSampling(0.0, 0, 1.0, number).packed(),
        choices=[ChoiceState(0)],
        stop_ids=[STOP],
        max_tokens=request.max_tokens,
    )


def simulate(trace: list[TraceRequest], policies: list[str]) -> list[Report]:
    """Play one trace under each policy. Raises ``ConfigError`` for an unknown one."""
    return [Simulation(trace, policy).run() for policy in map(make_policy, policies)]


def table(reports: list[Report]) -> str:
    """A Markdown table, aligned, one row a policy."""
    tenants = list(reports[0].slowdown)
    head = ["policy", "mean TTFT", "median", "p99", "mean e2e"]
    head += [f"slowdown {tenant}" for tenant in tenants]
    head += ["max wait", "tok/s", "preempted"]
    rows = [
        [
            report.policy,
            *(f"{v:.2f} s" for v in (report.mean_ttft, report.median_ttft)),
            *(f"{v:.1f} s" for v in (report.p99_ttft, report.mean_e2e)),
            *(f"{report.slowdown[tenant]:.1f}" for tenant in tenants),
            f"{report.max_wait:.1f} s",
            f"{report.throughput:.0f}",
            str(report.preemptions),
        ]
        for report in reports
    ]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [" | ".join(map(str.ljust, row, widths)) for row in (head, *rows)]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)


def main(argv: list[str] | None = None) -> int:
    """The command. Returns its exit code: 2 for an unknown policy or a bad trace."""
    parser = argparse.ArgumentParser(
        prog="python -m penstock.loadtest.studies.simulate_policies",
        description="Compare scheduling policies on a recorded trace, with a computed clock.",
    )
    parser.add_argument("--policy", action="append", help="default: all built in; may be repeated")
    parser.add_argument("--trace", type=Path, default=RECORDED, help="JSON lines")
    parser.add_argument("--requests", type=int, help="play only so many of the first requests")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    arguments = parser.parse_args(argv)
    try:
        trace = read(arguments.trace)[: arguments.requests]
        if not trace:
            raise ValueError(f"{arguments.trace}: holds no request")
        reports = simulate(trace, arguments.policy or list(POLICIES))
    except (ConfigError, ValueError, OSError) as error:
        print(f"simulate_policies: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        shown = [{**asdict(report), "times": None} for report in reports]
        print(msgspec.json.encode(shown).decode())
    else:
        print(f"{len(trace)} requests of {arguments.trace.name}")
        print(table(reports))
    return 0


if __name__ == "__main__":
    sys.exit(main())
