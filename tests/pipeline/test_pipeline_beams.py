"""Beam search over HTTP: what it finds, what it refuses, and what is left when its client goes."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.pipeline.clients import ask_together
from support.pipeline.served import SMALL, Served, SharedServers

BEAMS = {"prompt": "The mill", "max_tokens": 12, "use_beam_search": True}
BEGUN_SECONDS = 0.3
"""A long search runs by then: each of its steps is too short for a counter to tell of it."""


@pytest.fixture(scope="module")
def server(small_model: Path, shared_server: SharedServers) -> Served:
    return shared_server(str(small_model), *SMALL)


def token_ids(server: Served, **body: Any) -> list[list[int]]:
    """Of each answer to a search."""

    async def run() -> list[list[int]]:
        whole = {**BEAMS, **body, "return_token_ids": True}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90)) as session,
            session.post(f"{server.url}/v1/completions", json=whole) as response,
        ):
            assert response.status == 200, await response.text()
            return [choice["token_ids"] for choice in (await response.json())["choices"]]

    return asyncio.run(run())


def test_the_likeliest_of_one_beam_is_the_greedy_answer_and_more_beams_are_ranked(
    server: Served,
) -> None:
    greedy, one, three, two = ask_together(
        server.url,
        {"prompt": "The mill", "max_tokens": 12, "temperature": 0},
        BEAMS,
        {**BEAMS, "n": 3},
        {**BEAMS, "n": 2, "best_of": 3, "temperature": 0, "prompt": ["The mill", "Go:"]},
    )
    assert one.status == three.status == two.status == 200, (one.error, three.error, two.error)
    assert (one.text, one.finish) == (greedy.text, greedy.finish)
    assert one.usage == greedy.usage
    assert (len(three.text), len(two.text)) == (3, 4)
    ids = token_ids(server, n=3)
    assert len({*map(tuple, ids)}) == 3
    assert token_ids(server, n=2, best_of=3) == ids[:2]
    assert three.usage is not None and three.usage["completion_tokens"] >= 1 + 3 * 11


def test_what_a_search_does_not_do_is_refused_by_name(server: Served) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"stream": True}, "stream"),
        ({"temperature": 0.7}, "temperature"),
        ({"logprobs": 1}, "logprobs"),
        ({"stop": "a"}, "stop"),
        ({"banned_strings": ["a"]}, "banned_strings"),
        ({"n": 11}, "n"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"max_tokens": 5000, "n": 4}, "max_tokens"),
        ({"max_tokens": 16000}, "max_tokens"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
        ({"length_penalty": 11}, "length_penalty"),
    ]
    answers = ask_together(server.url, *({**BEAMS, **body} for body, _ in cases))
    for (body, param), answer in zip(cases, answers, strict=True):
        assert answer.status == 400, body
        assert answer.error is not None and answer.error["param"] == param, answer.error


@pytest.mark.slow  # transformers
def test_answers_are_those_of_transformers(server: Served, small_model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(small_model)
    ids = torch.tensor([tokenizer("The mill").input_ids])
    found = model.generate(
        ids, num_beams=4, num_return_sequences=4, max_new_tokens=12, do_sample=False,
        length_penalty=0.5, pad_token_id=0,
    )  # fmt: skip
    rows = [row[ids.shape[1] :].tolist() for row in found]
    answers = token_ids(server, n=4, length_penalty=0.5)
    assert [row[: len(one)] for row, one in zip(rows, answers, strict=True)] == answers


@pytest.mark.slow  # kills
def test_a_search_goes_on_when_processes_die(server: Served, shared_server: SharedServers) -> None:
    body = {**BEAMS, "n": 3, "max_tokens": 60, "ignore_eos": True}
    undisturbed = token_ids(server, **body)

    def kill() -> None:
        for role in ("worker", "tokenizer"):
            time.sleep(BEGUN_SECONDS)
            for process in server.processes().values():
                if server.role_of(process) == role:
                    process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    found = token_ids(server, **body)
    killer.join()
    shared_server.renewed(server)
    assert found == undisturbed
