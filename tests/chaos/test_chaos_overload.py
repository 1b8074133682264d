"""One, three and ten times what a server can do, and the time after.

The clients come at random and wait for nobody. With CHAOS_REPORT=FILE the figures are added to the
file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from support.chaos.overload import (
    CAPACITY,
    MAX_WAIT,
    NORMAL_SECONDS,
    PACED,
    PROMPT,
    SHED_P99_S,
    SHED_TO_PLAIN,
    TOKENS,
    TTFT_S,
    figures,
    probe,
)
from support.chaos.victims import nothing_held
from support.pipeline.open_loop import Offered, go, median_ttft, percentile, visitors
from support.pipeline.served import served

SECONDS = 30.0


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="1 frontend"),
        pytest.param(("--frontends", "2"), id="2 frontends"),
        # 25 requests fill KV memory, so most slots stay free.
        pytest.param(
            ("--max-num-seqs", "96", "--num-kv-blocks", "150", "--no-enable-prefix-caching"),
            id="little KV memory",
        ),
    ],
)
def test_goodput_holds_at_ten_times_the_capacity_and_shed_answers_are_quick(
    flags: tuple[str, ...], report: Callable[..., None]
) -> None:
    async def main(url: str) -> dict[float, dict[str, Any]]:
        found = {}
        with visitors(url, prompt=PROMPT, max_tokens=TOKENS, temperature=0) as clients:
            usual = median_ttft([await clients.visit() for _ in range(5)])
            assert usual < TTFT_S / 4
            for times in (1, 3, 10):
                offered, plain = await asyncio.gather(
                    clients.load(times * CAPACITY, SECONDS, seed=times),
                    probe(clients, SECONDS),
                )
                # The load's last request has ended by now; the clock starts at its last arrival.
                ended = max(visit.ended for visit in offered.visits) - SECONDS
                normal = ended + await clients.normal_after(2 * usual + 0.1, limit_s=60.0)
                assert not offered.failed, offered.failed[:3]
                assert all(1 <= int(v.retry_after or 0) <= 30 for v in offered.shed)
                found[times] = figures(offered, plain, normal)
                report(times=times, **found[times])
        return found

    with served(*PACED, *MAX_WAIT, *flags) as server:
        found = go(lambda: main(server.url))
        nothing_held(server)
    best = max(one["goodput"] for one in found.values())
    assert found[10]["goodput"] >= 0.9 * best, found
    assert best >= 0.75 * CAPACITY, found
    assert all(one["normal_after_s"] < NORMAL_SECONDS for one in found.values()), found
    for times in (3, 10):
        limit = max(1e3 * SHED_P99_S, SHED_TO_PLAIN * found[times]["plain_p99_ms"])
        assert found[times]["shed_p99_ms"] <= limit, found


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_a_flood_of_long_prompts_by_one_tenant_costs_the_others_little(
    report: Callable[..., None],
) -> None:
    """`fair` and the tenant's share together; the others' streams do not stutter either."""

    async def main(url: str) -> tuple[Offered, Offered, Offered]:
        modest = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        flood = {"prompt": [3 + i % 200 for i in range(2000)], "max_tokens": TOKENS}
        with visitors(url, **modest) as light, visitors(url, **flood) as heavy:
            alone = await light.load(CAPACITY / 6, SECONDS / 2, seed=4, tenant="modest")
            beside, theirs = await asyncio.gather(
                light.load(CAPACITY / 6, SECONDS, seed=5, tenant="modest"),
                heavy.load(5 * CAPACITY, SECONDS, seed=6, tenant="flood"),
            )
        return alone, beside, theirs

    flags = (*PACED, *MAX_WAIT, "--scheduling-policy", "fair", "--no-enable-prefix-caching")
    with served(*flags) as server:
        alone, beside, theirs = go(lambda: main(server.url))
        nothing_held(server)
    served_share = len(beside.finished) / len(beside.visits)
    ttft = median_ttft(beside.finished)
    decode = percentile([v.e2e_s - v.ttft_s for v in beside.finished], 0.5)
    usual_decode = percentile([v.e2e_s - v.ttft_s for v in alone.finished], 0.5)
    report(
        served=served_share,
        ttft_ms=round(1e3 * ttft),
        ttft_alone_ms=round(1e3 * median_ttft(alone.finished)),
        ttft_flood_ms=round(1e3 * median_ttft(theirs.finished)),
        decode_s=round(decode, 3),
        decode_alone_s=round(usual_decode, 3),
        statuses=sorted({v.status for v in theirs.visits}),
    )
    assert len(alone.finished) == len(alone.visits)
    assert any(v.status == 429 for v in theirs.visits)
    assert served_share >= 0.9
    assert ttft < 1.0
    assert decode < 2 * usual_decode
