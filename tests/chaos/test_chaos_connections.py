"""Thousands of connections that wait, stream or never read cost the others nothing."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import time
import urllib.request
from collections.abc import Callable

import pytest
from support.chaos.footprint import MIB, files_are_closed, footprints, growth
from support.chaos.streams import Crowd, Followed, requests
from support.chaos.victims import nothing_held
from support.pipeline.served import Served, served

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

IDLE, STREAMS, DEAF = 10_000, 2_000, 500
FLAGS = ["--device", "null", "--null-step-ms", "500", "--max-num-seqs", "2600"]
FLAGS += ["--max-num-batched-tokens", "4096"]
FLAGS += ["--max-waiting-requests", "3000"]
MOST_BYTES = 32 * 1024
"""Bytes of a frontend's memory that each connection may take."""


async def idle(server: Served) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connections that have had one answer and stay open."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    opened = []
    for _ in range(IDLE):
        reader, writer = await asyncio.open_connection(host, int(port), limit=4096)
        writer.write(f"GET /live HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        opened.append((reader, writer))
    return opened


def deaf(server: Served) -> list[socket.socket]:
    """Streams of which nobody reads a byte."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    body = json.dumps({"prompt": [5], "max_tokens": 1000, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    opened = []
    for _ in range(DEAF):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall((head + body).encode())
        opened.append(client)
    return opened


async def probes(server: Served, stop: asyncio.Event) -> list[float]:
    """Seconds that ``/health`` takes, again and again."""

    def ask() -> float:
        began = time.monotonic()
        with urllib.request.urlopen(server.url + "/health", timeout=30) as answer:
            assert answer.status == 200
        return time.monotonic() - began

    found = []
    while not stop.is_set():
        found.append(await asyncio.to_thread(ask))
        await asyncio.sleep(0.1)
    return found


def test_twelve_thousand_connections_at_once_cost_no_stream_a_token(
    report: Callable[..., None],
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 16_000:
        pytest.skip("too few file descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    bodies = requests(
        STREAMS, seed=3, prompt_tokens=10, max_tokens=40, vocabulary=256, streamed=True
    )
    for number, body in enumerate(bodies):
        body["seed"] = number  # all that the null engine draws by
    with served(*FLAGS) as server:

        async def crowd_of(count: int) -> list[Followed]:
            async with Crowd(server.url, bodies[:count]) as crowd:
                return await crowd.ends()

        expected = asyncio.run(crowd_of(500))
        before = footprints(server)

        async def crowded() -> None:
            stop = asyncio.Event()
            asking = asyncio.create_task(probes(server, stop))
            waiting = await idle(server)
            silent = deaf(server)
            followed = await crowd_of(STREAMS)
            grown = growth(before, footprints(server))
            stop.set()
            took = sorted(await asking)
            report(health_ms=[round(took[len(took) * n // 100] * 1e3) for n in (50, 99)],
                   grown_mib=grown)  # fmt: skip
            assert all(one.done and one.completion_tokens == 40 for one in followed)
            assert [one.verdict() for one in followed[:500]] == [one.verdict() for one in expected]
            assert took[len(took) // 2] < 1.0 and took[-1] < 15.0, took[-5:]
            assert max(grown.values()) * MIB < (IDLE + STREAMS + DEAF) * MOST_BYTES, grown
            for _, writer in waiting:
                writer.close()
            for client in silent:
                client.close()

        asyncio.run(crowded())
        nothing_held(server)
        fronts = {pid: one for pid, one in before.items() if one.role.startswith("frontend")}
        assert fronts
        files_are_closed(server, fronts)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
