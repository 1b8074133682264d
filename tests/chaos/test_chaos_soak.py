"""20,000 requests of all kinds, sound, aborted and bad: no process grows."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable

import pytest
from support.chaos.footprint import files_are_closed, footprints, growth
from support.chaos.leavers import BAD_BODIES, Caller, at_once, body, request
from support.chaos.victims import nothing_held
from support.pipeline.open_loop import go
from support.pipeline.served import served

WARM, COUNT, AT_ONCE = 5_000, 20_000, 48
ABORTED, BAD = 0.10, 0.05
MOST_MIB = 16
NULL = ("--device", "null", "--num-kv-blocks", "16384")
# Few KV blocks: their memory counts as taken only when it is first written to.
CPU = ("--device", "cpu", "--dtype", "float32", "--num-kv-blocks", "1024")


async def soak(count: int, url: str, seed: int, words: int) -> Counter[str]:
    rng = random.Random(seed)
    found: Counter[str] = Counter()

    async def one(number: int, caller: Caller) -> None:
        kind = rng.random()
        if kind < BAD:
            path = rng.choice(["/v1/completions", "/v1/chat/completions"])
            seen = await caller.send(request(rng.choice(BAD_BODIES), path))
            assert seen.status == 400, seen
            found["bad"] += 1
        elif kind < BAD + ABORTED:
            asked = body(rng, max_tokens=400, words=words)
            path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
            data = request(json.dumps(asked).encode(), path)
            seen = await caller.send(data, leave_after=rng.random() * 0.2)
            found["aborted"] += 1
        else:
            seen = await caller.ask(body(rng, max_tokens=2 + words // 5, words=words))
            assert seen.status == 200 and seen.whole, seen
            found["finished"] += 1

    await at_once(count, AT_ONCE, url, one)
    return found


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("flags", "words"), [(NULL, 200), (CPU, 5)], ids=["null", "cpu"])
def test_twenty_thousand_mixed_requests_make_no_process_grow(
    flags: tuple[str, ...], words: int, report: Callable[..., None]
) -> None:
    with served(*flags) as server:
        began = time.monotonic()
        go(lambda: soak(WARM, server.url, 1, words))
        nothing_held(server)
        before = footprints(server)
        found = go(lambda: soak(COUNT - WARM, server.url, 2, words))
        nothing_held(server)
        after = footprints(server)
        grown = growth(before, after)
        report(found=found, grown_mib=grown, seconds=time.monotonic() - began)
        assert found["aborted"] > 0.08 * (COUNT - WARM)
        assert max(grown.values()) < MOST_MIB, grown
        files_are_closed(server, before)
        assert "Traceback" not in server.output
