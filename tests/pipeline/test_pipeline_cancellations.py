"""Requests, a fifth of them or more cancelled at random: nothing is lost, nothing stays."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import aiohttp
import psutil
import pytest
from support.pipeline.clients import Answer, ask
from support.pipeline.reference_models import write_model
from support.pipeline.served import Served, served

AT_ONCE = 64
GROWTH_BYTES = 64 * 1024 * 1024
KV_BLOCKS = 512
KV_BYTES = KV_BLOCKS * 16 * 2 * 2 * 2 * 16 * 4
"""Blocks of 16 tokens; keys and values of 2 layers with 2 heads of 16 numbers in float32."""


def private_bytes(process: psutil.Process) -> int:
    """RssAnon and VmSwap: memory that is this process's own."""
    found = 0
    with open(f"/proc/{process.pid}/status") as lines:
        for line in lines:
            if line.startswith(("RssAnon:", "VmSwap:")):
                found += int(line.split()[1]) * 1024
    return found


async def storm(server: Served, count: int, seed: int) -> tuple[list[Answer], int]:
    rng = random.Random(seed)
    answers: list[Answer] = []
    cancelled = 0
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        nonlocal cancelled
        leaves = rng.random() < 0.45
        # Half of those who leave ask for so much that it cannot be complete by then, however
        # fast the machine; of the others some end before their client leaves.
        endless = leaves and rng.random() < 0.5
        body = {
            "prompt": [rng.randrange(3, 250) for _ in range(rng.randrange(1, 60))],
            "max_tokens": 500 if endless else rng.randrange(1, 30),
            "temperature": rng.choice([0, 0.9]),
            "seed": number,
            "n": rng.choice([1, 1, 1, 2]),
            "stream": rng.random() < 0.5,
            "ignore_eos": True,
        }
        async with gate:
            task = asyncio.create_task(ask(session, server.url, body))
            if leaves:
                await asyncio.sleep(rng.random() * 0.12)
                if not task.done():
                    task.cancel()
                    cancelled += 1
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                return
            answer = await task
            assert answer.status == 200, answer.error
            assert answer.done and answer.error is None
            assert len(answer.finish) == body["n"]
            assert answer.usage or body["stream"]
            answers.append(answer)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(one(session, number) for number in range(count)))
    return answers, cancelled


@pytest.mark.parametrize("count", [80, pytest.param(2000, marks=pytest.mark.slow)])
def test_every_request_ends_once_and_nothing_stays_behind(count: int, tmp_path: Path) -> None:
    folder = str(write_model("qwen3", tmp_path / "tiny"))
    blocks = ("--num-kv-blocks", str(KV_BLOCKS))
    with served("--device", "cpu", "--dtype", "float32", *blocks, folder) as server:
        asyncio.run(storm(server, AT_ONCE, seed=1))
        before_metrics = server.settled()
        processes = server.processes()
        before = {pid: private_bytes(process) for pid, process in processes.items()}

        answers, cancelled = asyncio.run(storm(server, count, seed=2))

        metrics = server.settled()
        assert cancelled >= count * 0.2
        assert len(answers) >= count * 0.5
        assert set(server.processes()) == set(processes), "a process died or was replaced"
        for pid, process in processes.items():
            grown = private_bytes(process) - before[pid]
            role = server.role_of(process)
            # A worker takes a KV block's memory when the block is first written to.
            most = GROWTH_BYTES + (KV_BYTES if role == "worker" else 0)
            assert grown < most, f"{role} grew by {grown} bytes"
    for name in (
        "penstock_requests_running",
        "penstock_requests_waiting",
        "penstock_queue_depth",
        "penstock_kv_blocks_used",
    ):
        assert metrics[name] == before_metrics[name] == 0, name
    assert metrics["penstock_kv_blocks"] == before_metrics["penstock_kv_blocks"]
