"""Samplers over HTTP, by all processes: in every API, beside a neighbour, through a death."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.pipeline.clients import Answer, ask, take_event
from support.pipeline.served import SMALL, Served, SharedServers

NEIGHBOUR = {"prompt": "The water wheel", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
BODIES: list[dict[str, Any]] = [
    {"typical_p": 0.6, "tfs": 0.95, "top_a": 0.1, "sampler_order": ["tfs", 1, "typical_p"]},
    {"xtc_probability": 0.5, "xtc_threshold": 0.02, "nsigma": 2, "temperature_last": True},
    {"mirostat_mode": 2, "mirostat_tau": 3, "mirostat_eta": 0.5, "repetition_penalty": 1.2},
    {"dynatemp_min": 0.3, "dynatemp_max": 2, "skew": 0.4, "smoothing_factor": 0.2},
    {"eta_cutoff": 0.02, "epsilon_cutoff": 0.01, "no_repeat_ngram_size": 2, "logprobs": 2},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": ["e"], "n": 2},
]
KILLED = {
    "prompt": "Go: ", "max_tokens": 120, "temperature": 0.9, "seed": 6, "ignore_eos": True,
    "stream": True, "mirostat_mode": 2, "mirostat_tau": 4, "mirostat_eta": 0.4,
    "xtc_probability": 0.3, "xtc_threshold": 0.01, "dry_multiplier": 0.8, "no_repeat_ngram_size": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def server(small_model: Path, shared_server: SharedServers) -> Served:
    return shared_server(str(small_model), *SMALL)


def asked(server: Served, *bodies: dict[str, Any]) -> list[Answer]:
    async def run() -> list[Answer]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90)) as session:
            return await asyncio.gather(*(ask(session, server.url, body) for body in bodies))

    return asyncio.run(run())


def posted(server: Served, path: str, body: dict[str, Any]) -> Any:
    async def run() -> Any:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90)) as session,
            session.post(server.url + path, json=body) as response,
        ):
            assert response.status == 200, await response.text()
            return await response.json()

    return asyncio.run(run())


def test_samplers_draw_the_same_streamed_and_not_and_leave_a_neighbour_alone(
    server: Served,
) -> None:
    (alone,) = asked(server, NEIGHBOUR)
    usual = {"prompt": "Number of the mill", "max_tokens": 30, "seed": 3, "ignore_eos": True}
    (plain,) = asked(server, usual)
    *first, neighbour = asked(server, *({**usual, **body} for body in BODIES), NEIGHBOUR)
    second = asked(server, *({**usual, **body, "stream": True} for body in BODIES))
    for whole, streamed, body in zip(first, second, BODIES, strict=True):
        assert (whole.status, streamed.status) == (200, 200), (body, whole.error, streamed.error)
        assert whole.text == streamed.text, body
        assert whole.text[0] != plain.text[0], body
    assert neighbour.text == alone.text


def test_other_apis_ask_for_the_same_samplers(server: Served) -> None:
    """The same draws, by KoboldAI's names."""
    same = {"prompt": "The mill", "temperature": 0.9, "top_k": 40, "top_a": 0.05, "tfs": 0.9}
    body = {**same, "max_tokens": 20, "seed": 4, "ignore_eos": True, "typical_p": 0.8}
    order = {"sampler_order": [6, 0, 1, 3, 4, 2, 5], "mirostat_tau": 3}
    (wanted,) = asked(server, {**body, **order, "mirostat_mode": 2})
    kobold = {**same, **order, "max_length": 20, "sampler_seed": 4, "bypass_eos": True}
    found = posted(server, "/api/v1/generate", {**kobold, "typical": 0.8, "mirostat": 2})
    assert found["results"][0]["text"] == wanted.text[0]


async def streamed(server: Served, body: dict[str, Any], kills: str = "") -> Answer:
    """The answer to a streamed completion, in whose midst processes of a role are killed."""
    answer = Answer(200)
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90)) as session,
        session.post(server.url + "/v1/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        events = 0
        async for line in response.content:
            take_event(answer, line)
            events += line.startswith(b"data: ")
            if kills and events == 20:
                for process in server.processes().values():
                    if server.role_of(process) == kills:
                        process.kill()
                kills = ""
    return answer


@pytest.mark.slow  # a grammar does so in the quick run, and a sampler in the tests of workers
def test_samplers_go_on_as_they_would_have_when_the_worker_dies(
    server: Served, shared_server: SharedServers
) -> None:
    undisturbed = asyncio.run(streamed(server, KILLED))
    answer = asyncio.run(streamed(server, KILLED, "worker"))
    shared_server.renewed(server)
    assert answer.error is None and answer.done
    assert answer.text == undisturbed.text


def without(texts: dict[int, str], length: int = 3) -> list[str]:
    """Strings that stand in these texts, to be banned."""
    return [text[at : at + length] for text in texts.values() for at in range(2, 30, 9)]


def test_banned_strings_do_not_come_and_nothing_of_them_is_seen_or_counted(server: Served) -> None:
    body = {"prompt": "The mill", "max_tokens": 40, "seed": 8, "ignore_eos": True, "n": 2}
    (plain,) = asked(server, body)
    body |= {"banned_strings": without(plain.text), "logprobs": 1}
    told = {**body, "stream": True, "stream_options": {"include_usage": True}}
    whole, stream = asked(server, body, told)
    assert whole.text == stream.text != plain.text
    for choice, text in whole.text.items():
        assert not [one for one in body["banned_strings"] if one.lower() in text.lower()]
        for answer in (whole, stream):
            columns = answer.logprobs[choice]
            assert len(columns["tokens"]) == 40 and "".join(columns["tokens"]) == text
    for answer in (whole, stream):
        assert answer.error is None and answer.usage["completion_tokens"] == 80
        assert set(answer.finish.values()) == {"length"}
    (refused,) = asked(server, {**body, "structured_outputs": {"regex": "a+"}})
    assert refused.status == 400 and "banned_strings" in refused.error["message"]


@pytest.mark.slow  # kills
@pytest.mark.parametrize("role", ["worker", "scheduler", "tokenizer"])
def test_banned_strings_come_to_the_same_text_when_a_process_dies(
    server: Served, shared_server: SharedServers, role: str
) -> None:
    body = {"prompt": "Go: ", "max_tokens": 150, "seed": 6, "ignore_eos": True, "stream": True}
    plain = asyncio.run(streamed(server, body))
    body["banned_strings"] = without(plain.text) + without(plain.text, 2)
    undisturbed = asyncio.run(streamed(server, body))
    assert undisturbed.text != plain.text
    answer = asyncio.run(streamed(server, body, role))
    shared_server.renewed(server)
    assert answer.error is None and answer.done
    assert answer.text == undisturbed.text
