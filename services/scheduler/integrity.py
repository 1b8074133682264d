"""What must be true between any two calls of the core; the tests look after every one."""

from __future__ import annotations

from collections.abc import Collection

from penstock.services.scheduler.planned_step import Step
from penstock.services.scheduler.planner import Planner
from penstock.services.scheduler.registry import RequestRegistry
from penstock.services.scheduler.waiting_queue import WaitingQueue


def check_state(
    planner: Planner,
    waiting: WaitingQueue,
    requests: RequestRegistry,
    pending: Collection[Step],
) -> None:
    """Blocks: free + cached + used = total, with right reference counts. Every slot is used once
    or free. Every open sequence is in one place, and what is in flight for it has rows in the
    unanswered steps. O(everything). Raises ``RuntimeError`` that names what is wrong.
    """
    batch = planner.batch
    planner.kv.check(sequence.kv for sequence in batch.sequences.values())
    batch.check()
    if batch.adapters is not None:
        batch.adapters.check(batch.sequences.values())
    waiting.check()
    rows = [row for step in pending for row in step.rows]
    places = 0
    for sequence in requests.sequences():
        waits = sequence.queue_place is not None
        places += sequence.running + waits
        if rows.count(sequence) != sequence.in_flight:
            raise RuntimeError("tokens in flight and rows of unanswered plans differ")
        if sequence.running and waits:
            raise RuntimeError("a sequence runs and waits")
        if not (sequence.running or waits or sequence.in_flight):
            raise RuntimeError("a sequence is forgotten: it neither runs nor waits")
    if places != len(batch) + len(waiting) + waiting.num_put_off:
        raise RuntimeError("a sequence of no open request runs or waits")
