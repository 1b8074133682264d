"""Adapters as models, over every API, by all processes: named, listed, and through deaths."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.chaos.victims import find
from support.pipeline.adapter_folders import write_adapter, write_soft_prompt
from support.pipeline.clients import Answer, ask, take_event
from support.pipeline.served import SMALL, Served, served

from penstock.loadtest.models.make_adapters import linear_sizes

NAMES = ("mill", "wheel")
VIRTUAL = 23
"""Rows of the soft prompt ``soft``."""
PROMPT = "The water wheel turns because"
TEXT = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def flags(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root, found = tmp_path_factory.mktemp("adapters"), []
    for seed, name in enumerate(NAMES):
        folder = write_adapter(root / name, linear_sizes(small_model), seed=seed)
        found += ["--lora", f"{name}={folder}"]
    soft = write_soft_prompt(root / "soft", VIRTUAL, 32, seed=5)
    found += ["--lora", f"soft={soft}"]
    return [str(small_model), *SMALL, "--served-model-name", "base", *found]


@pytest.fixture(scope="module")
def server(flags: list[str]) -> Iterator[Served]:
    with served(*flags) as running:
        yield running


def asked(server: Served, *bodies: dict[str, Any]) -> list[Answer]:
    async def run() -> list[Answer]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90)) as session:
            return await asyncio.gather(*(ask(session, server.url, body) for body in bodies))

    return asyncio.run(run())


def test_an_adapter_is_a_model_that_names_its_parent(server: Served) -> None:
    with urllib.request.urlopen(server.url + "/v1/models") as answer:
        cards = json.load(answer)["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        ("base", "base", None), ("mill", "mill", "base"), ("wheel", "wheel", "base"),
        ("soft", "soft", "base"),
    ]  # fmt: skip
    longest = {card["id"]: card["max_model_len"] for card in cards}
    assert longest["mill"] == longest["base"] == longest["soft"] + VIRTUAL
    status, found = server.post("/v1/completions", {**TEXT, "model": "weel"})
    assert status == 404 and found["error"]["code"] == "model_not_found"
    assert (
        "served here: 'base', 'mill', 'wheel', 'soft'; did you mean 'wheel'?"
        in found["error"]["message"]
    )


def test_rows_of_one_batch_have_each_their_own_adapter(server: Served) -> None:
    bodies = [{**TEXT, "model": name} for name in ("base", *NAMES)]
    alone = [asked(server, body)[0] for body in bodies]
    assert len({answer.text[0] for answer in alone}) == 3
    assert asked(server, TEXT)[0].text == alone[0].text  # without a name: the base
    together = asked(server, *bodies * 3, {**TEXT, "model": "mill", "n": 3, "seed": 1})
    assert [answer.text for answer in together[:9]] == [answer.text for answer in alone] * 3
    assert set(together[9].text.values()) == {alone[1].text[0]}
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "b"]}}}
    (held,) = asked(
        server, {**TEXT, "model": "mill", "response_format": shape, "ignore_eos": False}
    )
    assert json.loads(held.text[0]) in ("a", "b")


def test_a_soft_prompt_changes_the_answer_and_nothing_else_that_is_seen(server: Served) -> None:
    shown = {**TEXT, "echo": True, "logprobs": 1, "prompt_logprobs": 0}
    base, soft = (asked(server, {**shown, "model": name})[0] for name in ("base", "soft"))
    assert soft.text[0].startswith(PROMPT)
    assert soft.usage is not None and base.usage is not None
    assert soft.usage["prompt_tokens"] == base.usage["prompt_tokens"]
    ours, theirs = soft.prompt_logprobs[0], base.prompt_logprobs[0]
    assert [one and one.keys() for one in ours] == [one and one.keys() for one in theirs]
    assert ours[0] is None and ours != theirs
    alone = asked(server, {**TEXT, "model": "soft"})[0].text[0]
    assert PROMPT + alone == soft.text[0]
    mixed = [{**TEXT, "model": name} for name in ("soft", "mill", "base", "soft")]
    together = asked(server, *mixed, {**TEXT, "model": "soft", "n": 2, "repetition_penalty": 1.2})
    assert together[0].text == together[3].text == {0: alone}
    assert PROMPT + together[2].text[0] == base.text[0]
    assert together[4].text[0] == together[4].text[1]


def test_beams_and_grammars_have_a_soft_prompt_and_vectors_have_none(server: Served) -> None:
    beams = {"prompt": PROMPT, "max_tokens": 5, "use_beam_search": True, "n": 2}
    found = [asked(server, {**beams, "model": name})[0] for name in ("base", "soft")]
    assert found[0].error is None and found[1].error is None and found[0].text != found[1].text
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "b"]}}}
    held = {**TEXT, "model": "soft", "response_format": shape, "ignore_eos": False}
    assert json.loads(asked(server, held)[0].text[0]) in ("a", "b")
    status, _ = server.post("/v1/embeddings", {"model": "soft", "input": "Hello"})
    assert status == 400


def test_a_prompt_that_is_too_long_with_virtual_tokens_is_told_so(server: Served) -> None:
    with urllib.request.urlopen(server.url + "/v1/models") as answer:
        cards = {card["id"]: card["max_model_len"] for card in json.load(answer)["data"]}
    longest = cards["soft"]
    ids, words = [7] * (longest - 1), f"the {VIRTUAL} virtual tokens of the adapter"
    asks = {**TEXT, "prompt": ids, "model": "soft"}
    fits, long = asked(server, {**asks, "max_tokens": 1}, {**asks, "max_tokens": 2})
    assert fits.status == 200 and fits.error is None
    assert fits.usage is not None and fits.usage["prompt_tokens"] == longest - 1
    assert (
        long.status == 400 and words in str(long.error) and f" {longest} tokens" in str(long.error)
    )
    (over,) = asked(server, {**asks, "prompt": [*ids, 7, 7]})
    assert over.status == 400 and words in str(over.error)


def test_every_api_chooses_an_adapter_by_the_models_name(server: Served) -> None:
    def texts(name: str) -> list[str]:
        usual = {"model": name, "temperature": 0}
        _, chat = server.post(
            "/v1/chat/completions",
            {**usual, "messages": CHAT, "max_tokens": 12, "ignore_eos": True},
        )
        _, response = server.post(
            "/v1/responses", {**usual, "input": "Hello", "max_output_tokens": 12}
        )
        _, message = server.post("/v1/messages", {**usual, "messages": CHAT, "max_tokens": 12})
        options = {"temperature": 0, "num_predict": 12}
        _, ollama = server.post(
            "/api/chat", {"model": name, "messages": CHAT, "stream": False, "options": options}
        )
        assert {chat["model"], response["model"], message["model"], ollama["model"]} == {name}
        return [
            chat["choices"][0]["message"]["content"],
            response["output"][0]["content"][0]["text"],
            message["content"][0]["text"],
            ollama["message"]["content"],
        ]

    base, mill = texts("base"), texts("mill")
    assert all(ours != theirs for ours, theirs in zip(mill, base, strict=True)), (mill, base)


@pytest.mark.chaos
@pytest.mark.parametrize("role", ["worker", "scheduler", "tokenizer"])
def test_streams_go_on_with_their_adapters_when_a_process_dies(server: Served, role: str) -> None:
    body = {**TEXT, "max_tokens": 150, "stream": True}
    bodies = [{**body, "model": name} for name in ("base", *NAMES, "soft")] * 2

    async def one(body: dict[str, Any], begun: asyncio.Semaphore) -> Answer:
        answer, events = Answer(200), 0
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90)) as session,
            session.post(server.url + "/v1/completions", json=body) as response,
        ):
            assert response.status == 200, await response.text()
            async for line in response.content:
                take_event(answer, line)
                events += line.startswith(b"data: ")
                if events == 10:
                    begun.release()
        return answer

    async def run() -> list[Answer]:
        begun = asyncio.Semaphore(0)
        streams = [asyncio.create_task(one(body, begun)) for body in bodies]
        for _ in streams:
            await begun.acquire()
        find(server, role).kill()
        return await asyncio.gather(*streams)

    undisturbed = asked(server, *bodies)
    for answer, expected in zip(asyncio.run(run()), undisturbed, strict=True):
        assert answer.error is None and answer.done
        assert answer.text == expected.text


@pytest.mark.slow
def test_a_server_says_at_its_start_which_adapter_cannot_be_loaded(
    small_model: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "bad", {"model.layers.7.mlp.up_proj": (8, 8)})
    command = [sys.executable, "-m", "penstock.services", "serve", str(small_model), *SMALL]
    ended = subprocess.run(
        [*command, "--port", "0", "--lora", f"bad={folder}"],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert ended.returncode != 0
    said = ended.stdout + ended.stderr
    assert "--lora 'bad'" in said and "the model has no such linear layer" in said, said
