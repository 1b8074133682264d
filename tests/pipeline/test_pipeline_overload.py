"""More than a server can do: the rest is turned away at once, and those inside are served."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import pytest
from support.pipeline.open_loop import Visit, go, median_ttft, percentile, visitors
from support.pipeline.served import Served, served

SLOTS, TOKENS, STEP_MS = 12, 20, 20
CAPACITY = SLOTS / (TOKENS * STEP_MS / 1000)
"""Requests a second, if the machine keeps up: 30."""
LONG_STEP_MS, FEW_SLOTS = 50, 8
"""Of an engine that serves 8 requests a second: what is too much for it is little for a machine."""
WAIT_S = 1
"""Seconds that a request may wait for the engine, as far as that can be foreseen."""
PROMPT = list(range(3, 35))


def paced(step_ms: int, slots: int) -> AbstractContextManager[Served]:
    engine = ("--device", "null", "--null-step-ms", str(step_ms), "--max-num-seqs", str(slots))
    return served(*engine, "--max-wait-s", str(WAIT_S), "--scheduling-policy", "fair")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with paced(STEP_MS, SLOTS) as running:
        yield running


def nothing_held(server: Served) -> None:
    metrics = server.settled()
    for name in ("requests_running", "requests_waiting", "queue_depth", "kv_blocks_used"):
        assert metrics[f"penstock_{name}"] == 0, name


def generation_s(visits: Sequence[Visit]) -> float:
    """How long the tokens of an answer take here and now, from the first one on."""
    return statistics.median(v.e2e_s - v.ttft_s for v in visits)


def check_shed(shed: list[Visit], served: Sequence[Visit], *statuses: int) -> None:
    """served: those that were let in meanwhile."""
    assert {v.status for v in shed} == set(statuses), sorted({v.status for v in shed})
    for visit in shed:
        assert visit.retry_after is not None
        assert 1 <= int(visit.retry_after) <= 30
    # Milliseconds where the machine is not busy with other things.
    assert statistics.median(v.answer_s for v in shed) < statistics.median(v.e2e_s for v in served)


def test_what_is_too_much_is_shed_at_once_and_all_else_is_served_in_time() -> None:
    capacity = FEW_SLOTS / (TOKENS * LONG_STEP_MS / 1000)

    async def main() -> None:
        with visitors(server.url, prompt=PROMPT, max_tokens=TOKENS, temperature=0) as clients:
            before = [await clients.visit() for _ in range(2)]
            offered = await clients.load(5 * capacity, 3.0, seed=1)
            assert not offered.failed, offered.failed[:3]
            check_shed(offered.shed, offered.finished, 503)
            assert len(offered.shed) > len(offered.finished)
            quickest = min(v.e2e_s for v in offered.finished)
            assert statistics.median(v.answer_s for v in offered.shed) < quickest
            # Without a bound the last ones would wait for ten others, one after the other.
            bound = WAIT_S + 4 * generation_s(offered.finished)
            assert percentile([v.ttft_s for v in offered.finished], 0.9) < bound
            normal = 3 * median_ttft(before) + generation_s(before)
            await clients.normal_after(normal, limit_s=60.0, in_a_row=2)

    with paced(LONG_STEP_MS, FEW_SLOTS) as server:
        go(main)


def test_a_flood_of_one_tenant_is_told_429_and_does_not_keep_others_out(server: Served) -> None:
    async def main() -> None:
        with visitors(server.url, prompt=PROMPT, max_tokens=TOKENS, temperature=0) as clients:
            assert (await clients.visit("modest")).finished
            flood, modest = await asyncio.gather(
                clients.load(4 * CAPACITY, 3.0, seed=2, tenant="flood"),
                clients.load(2.0, 3.0, seed=3, tenant="modest"),
            )
            assert not flood.failed and not modest.failed
            assert any(v.status == 429 for v in flood.shed)
            check_shed([v for v in flood.shed if v.status == 429], flood.finished, 429)
            assert len(modest.finished) >= 0.6 * len(modest.visits)
            assert median_ttft(modest.finished) < median_ttft(flood.finished)

    go(main)
    nothing_held(server)


def test_a_prompt_that_is_too_long_for_any_engine_hears_that_and_not_that_the_server_is_full(
    server: Served,
) -> None:
    async def main() -> None:
        with (
            visitors(server.url, prompt=PROMPT, max_tokens=TOKENS) as clients,
            visitors(server.url, prompt="x " * 3_900_000) as endless,
        ):
            crowd = [clients.visit() for _ in range(SLOTS + SLOTS // 2)]
            *_, visit = await asyncio.gather(*crowd, endless.visit())
            assert visit.status == 400, visit

    go(main)
