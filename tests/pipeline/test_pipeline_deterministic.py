"""``deterministic: true`` in a request: the same answer alone, beside others and from the cache."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.pipeline.served import SMALL, Served, SharedServers

PROMPT = "The water falls through the penstock and turns the wheel. " * 3


@pytest.fixture(scope="module")
def server(small_model: Path, shared_server: SharedServers) -> Served:
    return shared_server(str(small_model), *SMALL)


def ask(server: Served, seed: int, deterministic: Any = True) -> tuple[int, Any]:
    return server.post(
        "/v1/completions",
        {
            "prompt": PROMPT, "max_tokens": 12, "temperature": 20, "seed": seed, "logprobs": 3,
            "ignore_eos": True, "deterministic": deterministic,
        },
    )  # fmt: skip


def test_an_answer_is_the_same_alone_beside_others_and_from_the_cache(server: Served) -> None:
    def answer(seed: int) -> Any:
        status, body = ask(server, seed)
        assert status == 200, body
        return body["choices"][0]["text"], body["choices"][0]["logprobs"]

    alone = [answer(seed) for seed in range(3)]
    assert len({text for text, _ in alone}) == 3, "draws differ with the seed"
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(answer, [seed % 3 for seed in range(12)]))
    assert together == [alone[seed % 3] for seed in range(12)]


@pytest.mark.parametrize("value", ["yes", 1, {}])
def test_another_value_is_refused(server: Served, value: Any) -> None:
    status, body = ask(server, 0, value)
    assert status == 400 and body["error"]["param"] == "deterministic", body
