"""The server whose overload is measured, what counts as good there, and the figures of a load.

The null engine is set to a pace that two cores can follow.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from support.pipeline.open_loop import Offered, Visitors, percentile

SLOTS, TOKENS, STEP_MS = 24, 20, 40
CAPACITY = SLOTS / (TOKENS * STEP_MS / 1000)
"""Requests a second: 30."""
PACED = ("--device", "null", "--null-step-ms", str(STEP_MS), "--max-num-seqs", str(SLOTS))
MAX_WAIT = ("--max-wait-s", "1")
TTFT_S, E2E_S = 2.0, 4.0
"""What counts as good. Unloaded, the first token comes after 0.05 s, the last after 0.85."""
NORMAL_SECONDS = 10.0
SHED_P99_S = 0.05
SHED_TO_PLAIN = 3.0
"""Where other work holds the processors, no answer is quicker than the plainest one. The slowest
percent of both are too few to be alike."""
PROBES = 50
"""Probes of the machine a second."""
PROMPT = list(range(3, 67))


async def probe(clients: Visitors, seconds: float) -> list[float]:
    """Seconds of the plainest of all answers, at fixed times: what a busy machine costs."""
    taken: list[float] = []
    start = time.perf_counter()

    async def one(at: float) -> None:
        await asyncio.sleep(start + at - time.perf_counter())
        began = time.perf_counter()
        await clients.alive()
        taken.append(time.perf_counter() - began)

    await asyncio.gather(*(one(number / PROBES) for number in range(round(seconds * PROBES))))
    return taken


def figures(offered: Offered, plain: list[float], normal_after: float) -> dict[str, Any]:
    done = offered.finished
    return {
        "offered": round(len(offered.visits) / offered.seconds, 1),
        "goodput": round(offered.goodput(TTFT_S, E2E_S), 2),
        "finished": len(done),
        "shed": len(offered.shed),
        "shed_p50_ms": round(1e3 * percentile([v.answer_s for v in offered.shed], 0.5), 1),
        "shed_p99_ms": round(1e3 * offered.shed_p99_s(), 1),
        "plain_p50_ms": round(1e3 * percentile(plain, 0.5), 1),
        "plain_p99_ms": round(1e3 * percentile(plain, 0.99), 1),
        "ttft_p50_ms": round(1e3 * percentile([v.ttft_s for v in done], 0.5)),
        "ttft_p99_ms": round(1e3 * percentile([v.ttft_s for v in done], 0.99)),
        "normal_after_s": round(normal_after, 2),
    }
