"""Limits of keys on a whole server with three frontends and a real Valkey server."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import aiohttp
import pytest
from support.pipeline.served import Served, served
from support.pipeline.valkey_process import BINARY, ValkeyProcess, valkey_process

from penstock.loadtest.models.make_model import make_model
from penstock.protocol.keys.key_file import change_keys, line_of
from penstock.protocol.keys.record import KeyLimits, new_key

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BINARY, reason="neither Valkey nor Redis is installed"),
]
LIMIT = 1_000_000
PROMPT, OUTPUT = 3_990, 10
CLIENTS = 12
"""Each has a connection of its own, so that all frontends have some."""
MINUTE = 60.0
LOAD_SECONDS = 2.0
"""Of load with the server of limits there, and as long without it."""


class Setup(NamedTuple):
    server: Served
    valkey: ValkeyProcess
    limited: str
    free: str


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    folder = tmp_path_factory.mktemp("limits")
    model = make_model(folder / "tiny", max_position_embeddings=4096)
    limited, first = new_key("ann", limits=KeyLimits(tokens_per_minute=LIMIT))
    free, second = new_key("bob", limits=KeyLimits(tokens_per_minute=10**9, concurrent=1000))
    keys = folder / "keys"
    change_keys(keys, lambda lines: [*lines, line_of(first), line_of(second)])
    with (
        valkey_process(folder) as valkey,
        served(
            *(
                str(model),
                "--device",
                "null",
                "--frontends",
                "3",
                "--max-num-batched-tokens",
                "8192",
            ),
            *("--keys-file", str(keys), "--limits-url", valkey.url),
        ) as server,
    ):
        yield Setup(server, valkey, limited, free)


class Load:
    """Clients that ask again and again until ``ends_at``; what the answers were."""

    def __init__(self, url: str, key: str, prompt: int, seconds: float) -> None:
        self.answers: Counter[int] = Counter()
        self.faults: list[str] = []
        self.used: list[tuple[float, int]] = []
        """Begin and tokens of each request that was served."""
        self.slowest = 0.0
        self._url = url + "/v1/completions"
        self._headers = {"Authorization": f"Bearer {key}"}
        self._body = {"prompt": [7] * prompt, "max_tokens": OUTPUT, "ignore_eos": True}
        self._ends_at = time.monotonic() + seconds

    async def run(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(CLIENTS)))

    async def _client(self) -> None:
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(headers=self._headers, connector=connector) as session:
            while (began := time.monotonic()) < self._ends_at:
                async with session.post(self._url, json=self._body) as response:
                    answer = await response.json()
                    self.answers[response.status] += 1
                    if response.status == 200:
                        self.used.append((began, answer["usage"]["total_tokens"]))
                        self.slowest = max(self.slowest, time.monotonic() - began)
                    elif response.status == 429:
                        wait = int(response.headers["retry-after-ms"]) / 1000
                        await asyncio.sleep(min(wait, 0.3))
                    else:
                        self.faults.append(str(answer))


def test_a_million_tokens_a_minute_hold_within_two_percent_over_three_frontends(
    setup: Setup,
) -> None:
    load = Load(setup.server.url, setup.limited, PROMPT, 1.1 * MINUTE)
    asyncio.run(load.run())
    assert not load.faults
    began = min(at for at, _ in load.used)
    tokens = sum(used for at, used in load.used if at < began + MINUTE)
    print(f"{tokens:,} tokens in the first minute, answers {dict(load.answers)}")
    assert abs(tokens - LIMIT) <= 0.02 * LIMIT
    for at, _ in load.used:
        assert sum(used for one, used in load.used if at <= one < at + MINUTE) <= 1.02 * LIMIT


def test_a_server_of_limits_that_is_killed_and_comes_back_under_load_fails_no_request(
    setup: Setup,
) -> None:
    load = Load(setup.server.url, setup.free, 20, 16.0)

    async def kill_and_start() -> None:
        for _ in range(3):
            await asyncio.sleep(LOAD_SECONDS)
            await asyncio.to_thread(setup.valkey.kill)
            await asyncio.sleep(LOAD_SECONDS)
            await asyncio.to_thread(setup.valkey.start)

    async def main() -> None:
        await asyncio.gather(load.run(), kill_and_start())

    asyncio.run(main())
    print(f"answers {dict(load.answers)}, the slowest {load.slowest:.3f} s")
    assert set(load.answers) == {200}
    assert load.answers[200] > 100
    gone = setup.server.output.count("cannot be used")
    assert 3 <= gone <= 9 + 3
