"""Ollama's API over HTTP: what its clients send, and what they read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from support.frontend.frontend_scripted import LENGTH, STOP, Client, Script, rejected, run, say

from penstock.client.sink import RowExtras, Sink
from penstock.protocol.wire.messages.requests import Chat, PromptText, Work
from penstock.protocol.wire.messages.tokens import (
    Event,
    Reasoning,
    RowStart,
    Text,
    ToolArguments,
    ToolCallOpened,
)

CHAT, GENERATE = "/api/chat", "/api/generate"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"model": "alias", "messages": [{"role": "user", "content": "hi"}]},
    GENERATE: {"model": "alias", "prompt": "hi"},
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
COUNTS = ("prompt_eval_count", "eval_count")
TIMES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


async def lines(client: Client, path: str, **asked: Any) -> list[Any]:
    """The lines of a streamed answer."""
    body = json.dumps({**ASKED[path], **asked})
    async with client.session.post(client.url + path, data=body) as response:
        raw = await response.read()
        assert response.status == 200, raw
        assert response.content_type == "application/x-ndjson"
        assert raw.endswith(b"\n")
        return [json.loads(line) for line in raw.splitlines()]


def work_of(path: str, **asked: Any) -> Work:
    """What the pipeline is asked to do for a body."""

    async def use(client: Client) -> None:
        status, answer, _ = await client.post(path, {**ASKED[path], "stream": False, **asked})
        assert status == 200, answer

    return run(use).works[0]


def refusal(path: str, **asked: Any) -> str:
    """The error for a body, which must be a 400."""
    found = []

    async def use(client: Client) -> None:
        status, answer, _ = await client.post(path, {**ASKED[path], **asked})
        assert status == 400
        assert list(answer) == ["error"]
        found.append(answer["error"])

    gateway = run(use)
    assert gateway.works == []
    return str(found[0])


def talk(rows: list[list[Event]]) -> Script:
    """Accept, and say these events, a row each."""

    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(7)
        for index, row in enumerate(rows):
            start = RowStart(0, 0, 0.01) if index == 0 else None
            end = STOP if index == len(rows) - 1 else None
            sink.on_row(0, "", 1, RowExtras(start, end, events=row))
            await asyncio.sleep(0)

    return script


def test_an_answer_is_streamed_by_default_and_its_last_line_says_what_it_took() -> None:
    async def use(client: Client) -> None:
        for path in (CHAT, GENERATE):
            *pieces, last = await lines(client, path)
            assert {one["done"] for one in pieces} == {False}
            texts = [
                one["message"]["content"] if path == CHAT else one["response"] for one in pieces
            ]
            assert "".join(texts) == "Hello world"
            assert (last["done"], last["done_reason"]) == (True, "length")
            assert [last[name] for name in COUNTS] == [5, 2]
            assert all(isinstance(last[name], int) for name in TIMES)
            assert last["total_duration"] >= last["prompt_eval_duration"] > 0
            assert {one["model"] for one in (*pieces, last)} == {"alias"}

    run(use, say("Hello", " world", end=LENGTH, prompt_tokens=5))


def test_a_whole_answer_has_the_text_and_what_it_took() -> None:
    async def use(client: Client) -> None:
        for path in (CHAT, GENERATE):
            status, answer, response = await client.post(path, {**ASKED[path], "stream": False})
            assert (status, response.content_type) == (200, "application/json")
            text = answer["message"]["content"] if path == CHAT else answer["response"]
            assert text == "Hello world"
            assert (answer["done"], answer["done_reason"]) == (True, "stop")
            assert [answer[name] for name in COUNTS] == [3, 2]

    run(use)


ROWS: list[list[Event]] = [
    [Reasoning("Hm")],
    [Text("So")],
    [ToolCallOpened(0, "call-1", "weather"), ToolArguments(0, '{"city":')],
    [ToolArguments(0, '"Oslo"}'), ToolCallOpened(1, "call-2", "now"), ToolArguments(1, "{}")],
    [Text("!")],
]
CALLS = [
    {"id": "call-1", "function": {"index": 0, "name": "weather", "arguments": {"city": "Oslo"}}},
    {"id": "call-2", "function": {"index": 1, "name": "now", "arguments": {}}},
]


def test_thinking_and_tool_calls_come_whole_and_in_lines() -> None:
    async def use(client: Client) -> None:
        body = {**ASKED[CHAT], "tools": [TOOL], "think": True, "stream": False}
        _, whole, _ = await client.post(CHAT, body)
        assert whole["message"] == {
            "role": "assistant",
            "content": "So!",
            "thinking": "Hm",
            "tool_calls": CALLS,
        }
        found = [one["message"] for one in await lines(client, CHAT, tools=[TOOL], think=True)]
        assert "".join(one["content"] for one in found) == "So!"
        assert [one["thinking"] for one in found if "thinking" in one] == ["Hm"]
        assert [call for one in found for call in one.get("tool_calls", ())] == CALLS
        places = [bool(one.get("tool_calls")) for one in found]
        assert places.index(True) < [one["content"] for one in found].index("!")

    run(use, talk(ROWS))


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", '{"a":' * 3000], ids=lambda one: one[:6])
def test_arguments_that_are_no_object_become_text(arguments: str) -> None:
    rows: list[list[Event]] = [[ToolCallOpened(0, "call-1", "f"), ToolArguments(0, arguments)], []]

    async def use(client: Client) -> None:
        _, whole, _ = await client.post(CHAT, {**ASKED[CHAT], "tools": [TOOL], "stream": False})
        assert whole["message"] == {"role": "assistant", "content": arguments}
        first, last = await lines(client, CHAT, tools=[TOOL])
        assert first["message"] == whole["message"]
        assert last["done"]

    run(use, talk(rows))


def test_options_become_sampling_parameters() -> None:
    options = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 7, "num_predict": 4,
        "stop": ["x"], "repeat_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.2,
        "num_ctx": 8192, "num_gpu": 1, "use_mmap": True, "mirostat": 2, "typical_p": 0.5,
        "tfs_z": 0.9, "mirostat_tau": 4, "mirostat_eta": 0.2,
    }  # fmt: skip
    params = work_of(CHAT, options=options).params
    assert (params.mirostat_mode, params.mirostat_tau, params.mirostat_eta) == (2, 4.0, 0.2)
    assert (params.tfs, params.typical_p) == (0.9, 0.5)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 3, 0.9, 0.1)
    assert (params.seed, params.max_tokens, params.stop) == (7, 4, ["x"])
    assert params.repetition_penalty == 1.2
    assert (params.presence_penalty, params.frequency_penalty) == (0.1, 0.2)
    unlimited = {
        "num_predict": -1,
        "seed": -1,
        "repeat_penalty": 1.3,
        "repeat_last_n": 0,
        "stop": "y",
    }
    params = work_of(GENERATE, options=unlimited).params
    assert (params.max_tokens, params.seed, params.stop) == (None, None, ["y"])
    assert params.repetition_penalty == 1.0


@pytest.mark.parametrize(
    ("path", "asked", "words"),
    [
        (CHAT, {"options": {"mirostat": 1}}, "(mirostat) is 1; 2, Mirostat 2.0, or 0"),
        (CHAT, {"options": {"top_a": 0.2}}, "unknown parameter in options: top_a"),
        (CHAT, {"temperature": 1}, "put it into options"),
        (CHAT, {"options": {"temperature": -1}}, "options.temperature is -1; 0 to 100 is allowed"),
        (CHAT, {"messages": [{"role": "user", "images": ["aGk="]}]}, "images"),
        (GENERATE, {"images": ["aGk="]}, "not supported yet: images"),
        (GENERATE, {"context": [1, 2]}, "send the conversation to /api/chat"),
        (GENERATE, {"suffix": "x"}, "suffix"),
        (GENERATE, {"raw": True, "system": "s"}, "raw and system contradict each other"),
        (GENERATE, {"format": "xml"}, "format is 'xml'"),
        (GENERATE, {"top_logprobs": 2}, "together with logprobs: true"),
        (CHAT, {"think": "hard"}, "think is 'hard'"),
    ],
)
def test_what_is_not_done_is_refused_by_name(path: str, asked: dict[str, Any], words: str) -> None:
    assert words in refusal(path, **asked)


def test_a_format_becomes_a_grammar() -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}}
    for asked, kind in (("json", "json_object"), (schema, "json_schema")):
        grammar = work_of(CHAT, format=asked).params.structured_outputs
        assert grammar is not None
        assert (grammar.kind, grammar.param) == (kind, "format")
    assert work_of(CHAT, format="").params.structured_outputs is None


def test_a_prompt_is_a_chat_with_a_system_message_or_raw_text() -> None:
    prompt = work_of(GENERATE, system="Be brief.", think=False).prompt
    assert isinstance(prompt, Chat)
    assert json.loads(prompt.messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]
    assert json.loads(prompt.template_kwargs) == {"enable_thinking": False, "thinking": False}
    assert work_of(GENERATE, raw=True).prompt == PromptText("hi")


def test_results_of_tools_find_the_calls_that_they_answer() -> None:
    calls = [
        {"function": {"name": "weather", "arguments": {"city": city}}} for city in ("Oslo", "Rome")
    ]
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "thinking": "Hm", "tool_calls": calls},
        {"role": "tool", "tool_name": "weather", "content": "cold"},
        {"role": "tool", "content": "warm"},
    ]
    work = work_of(CHAT, messages=messages, tools=[TOOL], think="low")
    assert isinstance(work.prompt, Chat)
    assert json.loads(work.prompt.template_kwargs)["reasoning_effort"] == "low"
    _, asked, cold, warm = json.loads(work.prompt.messages)
    ids = [call["id"] for call in asked["tool_calls"]]
    assert len(set(ids)) == 2
    assert json.loads(asked["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo"}
    assert [cold["tool_call_id"], warm["tool_call_id"]] == ids
    assert work.output is not None
    assert json.loads(work.output.tools)[0]["function"]["name"] == "weather"


def test_a_request_without_a_prompt_generates_nothing() -> None:
    async def use(client: Client) -> None:
        for path, body in (
            (CHAT, {"model": "alias"}),
            (GENERATE, {"model": "alias", "prompt": ""}),
        ):
            status, answer, _ = await client.post(path, {**body, "keep_alive": 0})
            assert (status, answer["done"], answer["done_reason"]) == (200, True, "load")

    assert run(use).works == []


def test_errors_are_told_in_ollamas_words_before_a_stream_and_in_it() -> None:
    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        await asyncio.sleep(0)
        sink.on_rejected(rejected(500, "the worker is gone"))

    async def use(client: Client) -> None:
        assert (await lines(client, CHAT))[-1] == {"error": "the worker is gone"}
        status, answer, _ = await client.post(CHAT, {**ASKED[CHAT], "model": "none"})
        assert status == 404 and "'none' does not exist" in answer["error"]
        status, answer, _ = await client.post("/api/show", {"model": "none"})
        assert status == 404 and list(answer) == ["error"]

    run(use, script)


def test_the_models_are_listed_and_shown_under_each_of_their_names() -> None:
    async def use(client: Client) -> None:
        for path in ("/api/tags", "/api/ps"):
            _, answer, _ = await client.get(path)
            assert [one["name"] for one in answer["models"]] == ["org/model", "alias"]
        status, shown, _ = await client.post("/api/show", {"model": "alias:latest"})
        assert status == 200
        assert shown["model_info"]["penstock.context_length"] == 64
        assert "tools" in shown["capabilities"]
        _, answer, _ = await client.get("/api/version")
        assert answer["version"]

    run(use)


def test_logprobs_are_asked_for_as_in_chats() -> None:
    params = work_of(CHAT, logprobs=True, top_logprobs=2).params
    assert params.logprobs == 2
