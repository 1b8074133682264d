"""What tests of the library's asynchronous clients share."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import psutil

from penstock import AsyncLLM, RequestOutput, SamplingParams

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "max_num_seqs": 16,
}
LONG = SamplingParams(max_tokens=1500, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def server_of(llm: AsyncLLM) -> Any:
    assert llm._processes.server is not None
    return llm._processes.server.process


def open_requests(llm: AsyncLLM) -> dict[int, Any]:
    assert llm._processes.client is not None
    return llm._processes.client.ledger.open


def workers_of(llm: AsyncLLM) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(server_of(llm).pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "worker" in " ".join(process.cmdline()):
                found.append(process)
    return found


async def rest_of(generator: AsyncIterator[RequestOutput]) -> None:
    async for _ in generator:
        pass


def prompt(number: int) -> list[int]:
    return [5 + number % 400, 6, 7]
