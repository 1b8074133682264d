"""Structured outputs over HTTP, by all processes: valid, with other parameters, through a death."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.pipeline.clients import Answer, ask_together, take_event
from support.pipeline.served import SMALL, Served, SharedServers

CHAT = "/v1/chat/completions"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": SCHEMA}}
NEIGHBOUR = {"prompt": "The water wheel", "max_tokens": 150, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(small_model: Path, shared_server: SharedServers) -> Served:
    return shared_server(str(small_model), *SMALL)


def check_person(text: str) -> None:
    found = json.loads(text)
    assert set(found) == {"name", "age", "tags"}
    assert isinstance(found["name"], str) and len(found["name"]) <= 12
    assert isinstance(found["age"], int) and 0 <= found["age"] <= 130
    assert len(found["tags"]) <= 3 and set(found["tags"]) <= {"a", "b"}


@pytest.mark.parametrize(
    "temperature",
    [pytest.param(0, marks=pytest.mark.slow), 0.9, pytest.param(1.5, marks=pytest.mark.slow)],
)
def test_an_answer_that_ends_is_valid_json_of_its_schema(
    server: Served, temperature: float
) -> None:
    bodies = [
        {
            "messages": [{"role": "user", "content": f"Person {number}"}],
            "max_tokens": 400,
            "temperature": temperature,
            "seed": number,
            "response_format": FORMAT,
            "n": 2,
            "stream": number % 2 == 0,
        }
        for number in range(4)
    ]
    ended = 0
    for answer in ask_together(server.url, *bodies, path=CHAT):
        assert answer.status == 200 and answer.error is None, answer.error
        for choice, text in answer.text.items():
            if answer.finish[choice] == "stop":
                check_person(text)
                ended += 1
    assert ended


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": "[a-f]{3}-[0-9]{2,5}"}, r"[a-f]{3}-[0-9]{2,5}"),
        ({"choice": ["yes", "no", 'may "be"']}, 'yes|no|may "be"'),
        ({"grammar": 'start: "a" start "b" | "c"'}, r"a*cb*"),
        ({"grammar": 'root ::= "x" ("," "x")* "."'}, r"x(,x)*\."),
    ],
    ids=["regex", "choice", "Lark", "GBNF"],
)
def test_regexes_choices_and_grammars_are_followed(
    server: Served, wanted: dict[str, Any], pattern: str
) -> None:
    body = {"prompt": "Say: ", "max_tokens": 300, "structured_outputs": wanted}
    for answer in ask_together(server.url, *({**body, "seed": seed} for seed in range(5))):
        assert answer.status == 200, answer.error
        if answer.finish[0] == "stop":
            assert re.fullmatch(pattern, answer.text[0]), answer.text[0]


def test_rows_with_grammars_change_nothing_for_a_neighbour(server: Served) -> None:
    (alone,) = ask_together(server.url, NEIGHBOUR)
    body = {"prompt": "x", "max_tokens": 120, "response_format": FORMAT}
    others = [{**body, "seed": seed, "presence_penalty": 1.5} for seed in range(6)]
    *_, neighbour = ask_together(server.url, *others, NEIGHBOUR)
    assert neighbour.text == alone.text


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.7, "frequency_penalty": 2, "presence_penalty": 2},
        {"min_tokens": 25},
        {"ignore_eos": True},
        {"logit_bias": {"2": 100}},
        {"logprobs": 3, "echo": True},
        {"stop": ["9"], "include_stop_str_in_output": True},
        {"top_k": 1, "min_p": 0.5, "top_p": 0.3},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_grammar_holds_beside_other_parameters(server: Served, fields: dict[str, Any]) -> None:
    pattern = "([a-z]{2} ){1,4}[0-9]{3}"
    body = {"prompt": "x", "max_tokens": 60, "seed": 4, "structured_outputs": {"regex": pattern}}
    plain, streamed = ask_together(server.url, body | fields, body | fields | {"stream": True})
    assert (plain.status, streamed.status) == (200, 200), plain.error
    assert plain.text == streamed.text
    text = plain.text[0].removeprefix("x" if fields.get("echo") else "")
    assert re.match("([a-z]{2} ){0,4}", text)
    if plain.finish[0] == "stop" and "stop" not in fields:
        assert re.fullmatch(pattern, text)


@pytest.mark.parametrize("field", [{"allowed_token_ids": [5, 6]}, {"bad_words": ["a"]}])
def test_what_could_leave_no_token_is_refused(server: Served, field: dict[str, Any]) -> None:
    body = {"prompt": "x", "max_tokens": 5, "structured_outputs": {"regex": "a+"}}
    (answer,) = ask_together(server.url, body | field)
    assert answer.status == 400
    assert answer.error is not None and answer.error["param"] == "structured_outputs"


def test_a_grammar_goes_on_where_it_was_when_the_worker_dies(
    server: Served, shared_server: SharedServers
) -> None:
    pattern = "([a-z]{3} [0-9]{3} ){20}"
    body = {
        "prompt": "Go: ",
        "max_tokens": 200,
        "temperature": 0.9,
        "seed": 6,
        "stream": True,
        "structured_outputs": {"regex": pattern},
        "logprobs": 1,
    }

    async def run(*, kill: bool) -> Answer:
        answer = Answer(200)
        timeout = aiohttp.ClientTimeout(total=90)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(server.url + "/v1/completions", json=body) as response,
        ):
            assert response.status == 200
            events = 0
            async for line in response.content:
                take_event(answer, line)
                events += line.startswith(b"data: ")
                if kill and events == 20:
                    kill = False
                    for process in server.processes().values():
                        if server.role_of(process) == "worker":
                            process.kill()
        return answer

    undisturbed = asyncio.run(run(kill=False))
    answer = asyncio.run(run(kill=True))
    shared_server.renewed(server)
    assert answer.error is None and answer.done
    assert answer.text == undisturbed.text
    assert answer.logprobs == undisturbed.logprobs
    if answer.finish[0] == "stop":
        assert re.fullmatch(pattern, answer.text[0])
