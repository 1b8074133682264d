"""Every route's JSON is as it is declared, and the declarations give one schema."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import struct
from typing import Any

import jsonschema
import msgspec
import pytest
from support.frontend.frontend_scripted import LENGTH, Client, of_any_task, rejected, run, say

from penstock.client.answers import FINISH_REASONS
from penstock.client.sink import RowExtras, Sink
from penstock.protocol.declared import Declared, fields_of
from penstock.protocol.foreign_parameters import FOREIGN_PARAMETERS
from penstock.protocol.logprobs import NamedLogprobs
from penstock.protocol.sampling import PARAMETERS
from penstock.protocol.wire.messages.requests import Work
from penstock.protocol.wire.messages.tokens import RowDetails
from penstock.services.frontend.api_page import described
from penstock.services.frontend.app import OPEN_ROUTES, routes
from penstock.services.frontend.bodies import responses
from penstock.services.frontend.bodies.requests import ChatBody, CompletionBody
from penstock.services.frontend.bodies.routes import RouteBodies, structs_of
from penstock.services.frontend.dialects.chat import ChatDialect
from penstock.services.frontend.dialects.completions import CompletionsDialect
from penstock.services.frontend.dialects.registry import BUILT_IN
from penstock.services.frontend.openapi import describe
from penstock.services.frontend.requests import sleep_routes

DESCRIBED = described(BUILT_IN)
(CHAT,), (TEXT,) = ChatDialect.bodies, CompletionsDialect.bodies
SLEEPING = (sleep_routes.SLEEP, sleep_routes.WAKE, sleep_routes.IS_SLEEPING)
ASKED: dict[str, dict[str, Any]] = {
    CHAT.path: {"messages": [{"role": "user", "content": "hi"}]},
    TEXT.path: {"prompt": "x"},
    "/v1/embeddings": {"input": "x"},
    "/v1/rerank": {"query": "x", "documents": ["y", {"text": "z"}]},
    "/v2/rerank": {"query": "x", "documents": ["y"], "return_documents": False},
    "/rerank": {"query": "x", "documents": ["y"], "top_n": 1},
    "/v1/score": {"text_1": "x", "text_2": ["y", "z"]},
    "/score": {"queries": "x", "documents": "y"},
    "/v1/classify": {"input": "x"},
    "/classify": {"input": [[1, 2], [3]]},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "/api/chat": {"model": "alias", "messages": [{"role": "user"}], "stream": False},
    "/api/generate": {"model": "alias", "prompt": "x", "stream": False},
    "/api/show": {"model": "alias"},
    "/api/v1/generate": {"prompt": "x"},
    "/api/extra/generate/stream": {"prompt": "x"},
    "/api/extra/tokencount": {"prompt": "x"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "x"},
    "/v1/responses/input_tokens": {"input": "x"},
}


@functools.cache
def schemas() -> dict[str, Any]:
    return describe(DESCRIBED, OPEN_ROUTES, with_keys=True)["components"]["schemas"]


WAYS_OUT = [
    ("/v1/embeddings", "max_new_tokens", ""),
    ("/v1/embeddings", "inputs", "use input"),
    ("/v1/rerank", "top_k", "use top_n"),
    ("/v1/score", "inputs", ""),
    ("/tokenize", "max_new_tokens", ""),
    ("/tokenize", "text", "use prompt"),
    ("/detokenize", "token_ids", "use tokens"),
    ("/v1/responses", "max_new_tokens", "use max_output_tokens"),
    ("/v1/responses", "guided_json", "use text.format: "),
    ("/v1/responses/input_tokens", "max_new_tokens", ""),
    ("/v1/messages", "max_new_tokens", "use max_tokens"),
    ("/v1/messages/count_tokens", "max_new_tokens", ""),
    ("/v1/completions", "enable_thinking", "chat templates have it: use /v1/chat/completions"),
    ("/v1/chat/completions", "enable_thinking", "use chat_template_kwargs: "),
    ("/api/chat", "max_new_tokens", "use num_predict in options"),
    ("/api/chat", "guided_json", "use format"),
    ("/api/v1/generate", "max_new_tokens", "use max_length"),
    ("/api/v1/generate", "num_return_sequences", "use n"),
    ("/api/extra/tokencount", "max_new_tokens", ""),
]


@pytest.mark.parametrize(("path", "wrong", "way_out"), WAYS_OUT)
def test_the_way_out_of_a_wrong_name_is_one_of_the_route(
    path: str, wrong: str, way_out: str
) -> None:
    async def use(client: Client) -> None:
        status, answer, _ = await client.post(path, {**ASKED[path], wrong: 1})
        assert status == 400
        told = re.search(rf"unknown parameter: {wrong}(?: \((.*)\))?", json.dumps(answer))
        assert told is not None
        assert (told[1] or "").startswith(way_out) and bool(told[1]) == bool(way_out), answer

    run(use)


def test_no_route_advises_a_name_that_it_does_not_have() -> None:
    names = {*FOREIGN_PARAMETERS.renamed, *FOREIGN_PARAMETERS.explained}
    for route in DESCRIBED:
        if route.takes is None or not issubclass(route.takes, Declared):
            continue
        known, foreign = fields_of(route.takes), route.takes.FOREIGN
        for name in names | foreign.renamed.keys() | foreign.explained.keys():
            advised = re.match(r": use (\w+)(?:[:.]|$)", foreign.advice(name, known))
            assert advised is None or advised[1] in known, (route.path, name)


def check(raw: bytes, declared: type[msgspec.Struct]) -> Any:
    """Strictly as it is declared, by the struct and by its JSON schema."""
    assert declared.__struct_config__.forbid_unknown_fields
    decoded = msgspec.json.decode(raw, type=declared)
    reference = f"#/components/schemas/{declared.__name__}"
    schema = {"$ref": reference, "components": {"schemas": schemas()}}
    jsonschema.Draft202012Validator(schema).validate(json.loads(raw))
    return decoded


async def raw_of(client: Client, route: RouteBodies, status: int = 200, **asked: Any) -> bytes:
    body = {**ASKED.get(route.path, {}), **asked}
    path = route.path.replace("{model:.+}", "alias")
    how = {"data": json.dumps(body)} if route.method == "POST" else {}
    async with client.session.request(route.method, client.url + path, **how) as response:
        assert response.status == status
        return await response.read()


def test_every_route_is_described() -> None:
    known = {(route.method, route.path) for route in DESCRIBED}
    served = {(method, path) for method, path, _ in routes(BUILT_IN)}
    assert known <= served
    files = {path for _, path in served - known}
    assert all(path.startswith(("/playground/", "/docs/")) and "." in path for path in files)


def test_whole_answers_are_as_they_are_declared() -> None:
    async def use(client: Client) -> None:
        for route in DESCRIBED:
            if "{" in route.path or "/admin/" in route.path or route.path in SLEEPING:
                continue  # what they need, their own tests have
            if isinstance(route.gives, type) and issubclass(route.gives, msgspec.Struct):
                assert check(await raw_of(client, route), route.gives)
        for route in (CHAT, TEXT):
            answer = check(await raw_of(client, route, n=2, stop="x"), route.gives)
            assert len(answer.choices) == 2

    run(use, of_any_task(say("Hello", " world", end=LENGTH)))


@pytest.mark.parametrize("route", [CHAT, TEXT], ids=lambda route: route.path)
@pytest.mark.parametrize("option", [None, "include_usage", "continuous_usage_stats"])
def test_each_event_of_a_stream_is_as_it_is_declared(
    route: RouteBodies, option: str | None
) -> None:
    async def use(client: Client) -> None:
        options = {} if option is None else {"stream_options": {option: True}}
        raw = await raw_of(client, route, stream=True, n=2, **options)
        *events, done, rest = raw.split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
        assert route.streams is not None
        chunks = [check(event.removeprefix(b"data: "), route.streams) for event in events]
        assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}

    run(use, say("Hello", " world"))


LOGPROBS = {
    CHAT.path: {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 2},
    TEXT.path: {"logprobs": 2, "echo": True},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", [CHAT, TEXT], ids=lambda route: route.path)
def test_logprobs_are_as_they_are_declared(route: RouteBodies, stream: bool) -> None:
    entry = struct.pack("<iif2i2f", 1, 1, -0.5, 3, 4, -1.25, -1.5)
    row = NamedLogprobs(2, entry, [b" token", b"\xff", b"x"], [0])
    prompt = NamedLogprobs(2, entry, [b"a", b"b", b"c", b"d"], [0, 1])

    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(2)
        sink.on_row(0, " token", 1, RowExtras(details=RowDetails(0, row, prompt, "ab")))
        sink.on_row(0, "", 1, RowExtras(end=LENGTH))

    async def use(client: Client) -> None:
        asked = dict(LOGPROBS[route.path])
        if stream:
            asked.pop("prompt_logprobs", None)
        raw = await raw_of(client, route, stream=stream, **asked)
        if not stream:
            answer = check(raw, route.gives)
            assert answer.choices[0].logprobs is not None
            assert route is TEXT or len(answer.prompt_logprobs) == 2
            return
        first, *_ = raw.split(b"\n\n")
        assert route.streams is not None
        chunk = check(first.removeprefix(b"data: "), route.streams)
        assert chunk.choices[0].logprobs is not None

    run(use, script)


def test_errors_are_as_they_are_declared_before_a_stream_and_in_it() -> None:
    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        await asyncio.sleep(0)
        sink.on_rejected(rejected(500, "the worker is gone"))

    async def use(client: Client) -> None:
        for route in (CHAT, TEXT):
            wrong = check(await raw_of(client, route, 400, temperature=-1), responses.ErrorBody)
            assert wrong.error.param == "temperature"
            events = (await raw_of(client, route, stream=True)).split(b"\n\n")
            end = check(events[-2].removeprefix(b"data: "), responses.ErrorBody)
            assert end.error.message == "the worker is gone"
        async with client.session.get(client.url + "/nothing") as response:
            check(await response.read(), responses.ErrorBody)

    run(use, script)


def test_a_schema_follows_from_the_declarations() -> None:
    for body in structs_of(DESCRIBED):
        if getattr(body, "__name__", "") in schemas():
            jsonschema.Draft202012Validator.check_schema(schemas()[body.__name__])
    for body in (ChatBody, CompletionBody):
        assert set(PARAMETERS) - {"echo"} <= set(schemas()[body.__name__]["properties"])
        assert schemas()[body.__name__]["additionalProperties"] == {"type": "null"}
    temperature = schemas()["ChatBody"]["properties"]["temperature"]["anyOf"][0]
    assert (temperature["minimum"], temperature["maximum"]) == (0, 100)
    assert schemas()["CompletionBody"]["required"] == ["prompt"]
    reasons = set(schemas()["CompletionChoice"]["properties"]["finish_reason"]["enum"])
    assert reasons == set(FINISH_REASONS.values())
    of_chats = set(schemas()["ChatChoice"]["properties"]["finish_reason"]["enum"])
    assert of_chats == {*reasons, "tool_calls"}
