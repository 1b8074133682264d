"""Random schemas over HTTP, with the built-in model: every answer that ends is valid."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import aiohttp
import pytest
from support.conformance.random_schemas import random_schema
from support.conformance.schema_faults import faults
from support.pipeline.served import BUILT_IN, Served, SharedServers

AT_ONCE = 16
MAX_TOKENS = 320


@pytest.fixture(scope="module")
def server(shared_server: SharedServers) -> Served:
    return shared_server(*BUILT_IN)


async def answer(
    session: aiohttp.ClientSession, url: str, seed: int
) -> tuple[dict[str, Any], int, dict[str, Any]]:
    schema = random_schema(seed)
    body = {
        "messages": [{"role": "user", "content": f"Fill in form {seed}."}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0.7 + seed % 3 / 2,
        "seed": seed,
        "chat_template_kwargs": {"enable_thinking": seed % 4 == 0},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "form", "strict": True, "schema": schema},
        },
    }
    async with session.post(url + "/v1/chat/completions", json=body) as response:
        return schema, response.status, await response.json()


def check(server: Served, seeds: range) -> Counter[str]:
    """How many answers there were of each kind; every one that ended is valid."""

    async def run() -> list[tuple[dict[str, Any], int, dict[str, Any]]]:
        gate = asyncio.Semaphore(AT_ONCE)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:

            async def one(seed: int) -> tuple[dict[str, Any], int, dict[str, Any]]:
                async with gate:
                    return await answer(session, server.url, seed)

            return await asyncio.gather(*(one(seed) for seed in seeds))

    kinds: Counter[str] = Counter()
    for schema, status, found in asyncio.run(run()):
        if status == 400:
            kinds["refused"] += 1
            assert found["error"]["param"] == "response_format", found
            continue
        assert status == 200, (schema, found)
        (choice,) = found["choices"]
        kinds[choice["finish_reason"]] += 1
        if choice["finish_reason"] == "stop":
            thinking, _, text = choice["message"]["content"].rpartition("</think>")
            kinds["after thinking"] += bool(thinking)
            wrong = faults(schema, text)
            assert not wrong, (json.dumps(schema), text, wrong)
    return kinds


def test_answers_to_random_schemas_are_valid(server: Served) -> None:
    kinds = check(server, range(4))
    assert kinds["stop"] >= 2, kinds


@pytest.mark.slow
def test_answers_to_a_thousand_random_schemas_are_valid(server: Served) -> None:
    kinds = check(server, range(1000))
    print(dict(kinds))
    assert kinds["stop"] >= 500, kinds
