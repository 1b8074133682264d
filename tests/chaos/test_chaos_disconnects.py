"""10,000 clients leave at any moment: no request, no block, no file and no memory stays behind."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable

import pytest
from support.chaos.footprint import files_are_closed, footprints, growth
from support.chaos.leavers import Caller, at_once, body, request
from support.chaos.victims import nothing_held
from support.pipeline.open_loop import go
from support.pipeline.served import served

WARM, COUNT, AT_ONCE = 2_000, 10_000, 200
LONGEST_STAY = 4.0
PACED = ("--device", "null", "--null-step-ms", "5", "--num-kv-blocks", "16384")


async def leave(count: int, url: str, seed: int) -> Counter[str]:
    """Send so many requests whose clients leave; returns how far they got."""
    rng = random.Random(seed)
    found: Counter[str] = Counter()

    async def one(number: int, caller: Caller) -> None:
        asked = body(rng, max_tokens=400)
        path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
        data = request(json.dumps(asked).encode(), path)
        if rng.random() < 0.1:  # in the middle of the request
            data = data[: rng.randrange(1, len(data))]
        seen = await caller.send(data, leave_after=rng.random() ** 3 * LONGEST_STAY)
        found["whole" if seen.whole else "answered" if seen.status else "unanswered"] += 1

    await at_once(count, AT_ONCE, url, one)
    return found


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("processes", [1, 2])
def test_ten_thousand_disconnects_leave_nothing_behind(
    processes: int, report: Callable[..., None]
) -> None:
    several = ("--frontends", str(processes), "--tokenizers", str(processes))
    with served(*PACED, *several) as server:
        go(lambda: leave(WARM, server.url, 1))
        nothing_held(server)
        warm = footprints(server)
        found = go(lambda: leave(COUNT, server.url, 2))
        nothing_held(server)
        grown = growth(warm, footprints(server))
        report(found=found, grown_mib=grown)
        assert found["answered"] > COUNT * 0.2, found
        assert found["unanswered"] > COUNT * 0.05, found
        assert max(grown.values()) < 16, grown
        files_are_closed(server, warm)
        assert "Traceback" not in server.output
