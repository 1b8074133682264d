"""Clients that come again whenever they are turned away: at once, or when they are told to.

There are ten times as many as the server has slots, and none of them ever gives up. With
CHAOS_REPORT=FILE the figures are added to the file.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.chaos.overload import (
    MAX_WAIT,
    NORMAL_SECONDS,
    PACED,
    PROMPT,
    SHED_P99_S,
    SHED_TO_PLAIN,
    STEP_MS,
    TOKENS,
    figures,
    probe,
)
from support.chaos.victims import nothing_held
from support.pipeline.open_loop import Offered, Visitors, go, median_ttft, visitors
from support.pipeline.served import served

SLOTS = 8
CAPACITY = SLOTS / (TOKENS * STEP_MS / 1000)
"""Requests a second: 10. Few, so that ten times as many clients that ask without a pause leave the
machine to the server."""
STORM = 10 * SLOTS
"""Clients."""
SECONDS = 20.0
ARRIVE_SECONDS = 1.0


async def insist(
    clients: Visitors, count: int, *, patient: bool, seed: int, since: float
) -> list[Offered]:
    """So many clients ask, and ask again, until ``SECONDS`` after ``since``; returns the visits of
    each. When it is turned away, a patient one waits for as long as it is told to, another asks
    again at once."""
    rng = random.Random(seed)
    found = [Offered(SECONDS) for _ in range(count)]

    async def one(offered: Offered, begins: float) -> None:
        await asyncio.sleep(begins)
        while (left := since + SECONDS - time.perf_counter()) > 0:
            visit = await clients.visit(since=since)
            offered.visits.append(visit)
            if patient and visit.shed:
                await asyncio.sleep(min(left, float(visit.retry_after or 1)))

    await asyncio.gather(*(one(each, rng.random() * ARRIVE_SECONDS) for each in found))
    return found


def together(found: list[Offered]) -> Offered:
    return Offered(SECONDS, [visit for each in found for visit in each.visits])


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("frontends", [1, 2])
def test_goodput_survives_a_storm_of_retries(frontends: int, report: Callable[..., None]) -> None:
    async def main(url: str) -> dict[str, dict[str, Any]]:
        found = {}
        with visitors(url, prompt=PROMPT, max_tokens=TOKENS, temperature=0) as clients:
            usual = median_ttft([await clients.visit() for _ in range(5)])
            calm = await clients.load(3 * CAPACITY, SECONDS, seed=1)
            found["no retries"] = figures(calm, [], 0.0)
            for name, eager in (("patient", 0), ("half of each", STORM // 2), ("eager", STORM)):
                since = time.perf_counter()
                hasty, meek, plain = await asyncio.gather(
                    insist(clients, eager, patient=False, seed=2, since=since),
                    insist(clients, STORM - eager, patient=True, seed=3, since=since),
                    probe(clients, SECONDS),
                )
                offered = together([*hasty, *meek])
                ended = max(visit.ended for visit in offered.visits) - SECONDS
                normal = ended + await clients.normal_after(2 * usual + 0.1, limit_s=60.0)
                assert not offered.failed, offered.failed[:3]
                assert all(1 <= int(v.retry_after or 0) <= 30 for v in offered.shed)
                found[name] = figures(offered, plain, normal)
                served_to = [sum(bool(one.finished) for one in group) for group in (hasty, meek)]
                report(
                    clients=name,
                    eager_served=served_to[0],
                    patient_served=served_to[1],
                    **found[name],
                )
        return found

    more = ("--frontends", str(frontends))
    with served(*PACED, "--max-num-seqs", str(SLOTS), *MAX_WAIT, *more) as server:
        found = go(lambda: main(server.url))
        nothing_held(server)
    best = max(one["goodput"] for one in found.values())
    assert best >= 0.75 * CAPACITY, found
    for name in ("patient", "half of each", "eager"):
        storm = found[name]
        # Two frontends and those who ask them without a pause are too much for two cores.
        share = 0.9 if frontends == 1 or name == "patient" else 0.8
        assert storm["goodput"] >= share * best, (name, found)
        assert storm["normal_after_s"] < NORMAL_SECONDS, (name, found)
        # A client that asks again at once waits for its turn among the others that do, so no
        # answer is quicker than the plainest one.
        limit = max(1e3 * SHED_P99_S, SHED_TO_PLAIN * storm["plain_p99_ms"])
        assert storm["shed_p99_ms"] <= limit, (name, found)
