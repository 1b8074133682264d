"""What one streamed token costs in the frontend. Run this file as a script to measure.

The test below it only guards against a cost of another order of magnitude.
"""

from __future__ import annotations

import asyncio
import time

from support.frontend.frontend_scripted import Client, run

from penstock.client.sink import Sink
from penstock.protocol.wire.messages.requests import Work

STREAMS = 64


async def _drain(client: Client) -> None:
    body = {"prompt": "x", "stream": True, "max_tokens": 1_000_000}
    async with client.session.post(client.url + "/v1/completions", json=body) as response:
        async for _ in response.content.iter_any():
            pass


def token_cost(rows: int, streams: int = STREAMS) -> tuple[float, float]:
    """(processor seconds a row in ``on_row`` alone, seconds a row with flush and socket).

    The second number also holds the test client's cost, which shares the event loop.
    """
    sinks: list[Sink] = []
    spent = 0.0
    everything = asyncio.Event()

    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        sinks.append(sink)
        if len(sinks) == streams:
            everything.set()
        await asyncio.sleep(3600)

    async def use(client: Client) -> None:
        nonlocal spent
        readers = [asyncio.ensure_future(_drain(client)) for _ in range(streams)]
        await everything.wait()
        await asyncio.sleep(0.1)
        for _ in range(rows):
            started = time.thread_time()
            for sink in sinks:
                sink.on_row(0, " token", 1)
            spent += time.thread_time() - started
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        for reader in readers:
            reader.cancel()

    started = time.perf_counter()
    run(use, script)
    elapsed = time.perf_counter() - started
    return spent / (rows * streams), elapsed / (rows * streams)


def test_a_row_costs_microseconds_not_milliseconds() -> None:
    alone, _ = token_cost(rows=50, streams=8)
    assert alone < 200e-6


if __name__ == "__main__":
    alone, everything = token_cost(rows=2000)
    print(
        f"on_row {alone * 1e6:.2f} us a row; with flush, socket and client "
        f"{everything * 1e6:.2f} us a row ({STREAMS} streams)"
    )
