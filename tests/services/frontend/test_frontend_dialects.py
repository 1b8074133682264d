"""Dialects: the streamed answer ends as the unstreamed one, events are rendered, and others may
bring dialects of their own."""

from __future__ import annotations

import asyncio
import importlib
import json
import struct
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.frontend.folded_streams import folded_chat
from support.frontend.frontend_scripted import (
    JSON,
    STOP,
    Client,
    Script,
    ScriptedGateway,
    rejected,
    run,
    say,
    serving,
)

from penstock.client.answers import Answer
from penstock.client.gateway_interface import ServedModel
from penstock.client.meters import Usage
from penstock.client.sink import RowExtras, Sink
from penstock.protocol.config import ConfigError
from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.logprobs import NamedLogprobs
from penstock.protocol.wire.messages.requests import PromptText, Work
from penstock.protocol.wire.messages.tokens import (
    End,
    EndReason,
    Event,
    Reasoning,
    RowDetails,
    RowStart,
    Text,
    ToolArguments,
    ToolCallOpened,
    Vector,
)
from penstock.services.frontend.body import Pause, decode_object
from penstock.services.frontend.dialects.registry import (
    BUILT_IN,
    ENTRY_POINT_GROUP,
    load_dialects,
)
from penstock.services.frontend.errors import ApiError, bad_request
from penstock.services.frontend.parse import GenerateRequest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    TEXT: {"prompt": ["one", "two"]},
}
PIECES = ["Wa", "ter", "", " flows 😀", "\u2028", " thr", "ough"]
ENDS = [End(0, EndReason.STOP, "##"), End(0, EndReason.LENGTH), End(0, EndReason.STOP, 7)]
CALL: list[Event] = [ToolCallOpened(0, "call-1", "weather"), ToolArguments(0, '{"city":')]


def named(tokens: Iterable[tuple[str, int]], most: int, first: str = "") -> NamedLogprobs:
    """Made-up logprobs of (piece, offset); first: the piece of a token that nothing predicts."""
    entries, pieces, offsets = b"", [first.encode()] if first else [], [0] if first else []
    for number, (piece, offset) in enumerate(tokens):
        ids = range(10, 10 + most)
        entries += struct.pack(
            f"<iif{most}i{most}f", number, 1, -0.5 - number, *ids, *([-2.0] * most)
        )
        pieces += [piece.encode(), *(f"<{one}>".encode() for one in ids)]
        offsets.append(offset)
    return NamedLogprobs(most, entries, pieces, offsets)


def talk(*, rest_s: float, logprobs: int | None = None, echo: bool = False) -> Script:
    """Every choice says the pieces, a token each, with what the request asked for beside them."""

    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(3)
        offset = 0
        for index, piece in enumerate(PIECES):
            for state in work.choices:
                start = RowStart(0, 2 * state.choice, 0.01) if index == 0 else None
                details = None
                if logprobs is not None or (echo and index == 0):
                    prompt = named([("mpt", 3)], logprobs or 0, "Pro") if echo else None
                    details = RowDetails(
                        0,
                        None if logprobs is None else named([(piece, offset)], logprobs),
                        prompt if index == 0 else None,
                        "Prompt" if echo and index == 0 else "",
                    )
                extras = RowExtras(start, None, details) if start or details else None
                sink.on_row(state.choice, piece, 1, extras)
            offset += len(piece)
            await asyncio.sleep(rest_s)
        for state in work.choices:
            sink.on_row(state.choice, ".", 1, RowExtras(end=ENDS[state.choice]))

    return script


async def fold_and_compare(client: Client, path: str, body: dict[str, Any]) -> None:
    status, whole, _ = await client.post(path, body)
    assert status == 200, whole
    streamed = {**body, "stream_options": {"include_usage": True}}
    assert folded_chat(await client.events(path, streamed), whole) == whole


@pytest.mark.parametrize("rest_s", [0.0, 0.005], ids=["at once", "token by token"])
@pytest.mark.parametrize(
    ("path", "asks", "says"),
    [
        (CHAT, {}, {}),
        (CHAT, {"n": 3}, {}),
        (CHAT, {"n": 3, "logprobs": True}, {"logprobs": 0}),
        (CHAT, {"n": 2, "logprobs": True, "top_logprobs": 2}, {"logprobs": 2}),
        (TEXT, {"n": 3}, {}),
        (TEXT, {"n": 2, "logprobs": 2}, {"logprobs": 2}),
        (TEXT, {"n": 2, "echo": True}, {"echo": True}),
        (TEXT, {"n": 2, "echo": True, "logprobs": 1}, {"echo": True, "logprobs": 1}),
    ],
)
def test_the_frames_of_a_stream_add_up_to_the_unstreamed_answer(
    path: str, asks: dict[str, Any], says: dict[str, Any], rest_s: float
) -> None:
    async def use(client: Client) -> None:
        await fold_and_compare(client, path, {**BODIES[path], "stop": ["##"], **asks})

    run(use, talk(rest_s=rest_s, **says))


@pytest.mark.parametrize("rest_s", [0.0, 0.005], ids=["at once", "token by token"])
def test_a_chat_renders_reasoning_text_and_tool_calls_whole_and_in_frames(rest_s: float) -> None:
    rows: list[list[Event]] = [
        [Reasoning("Hm")],
        [Reasoning(", so"), Text("It")],
        CALL,
        [ToolArguments(0, '"Oslo"}'), ToolCallOpened(1, "call-2", "now"), ToolArguments(1, "{}")],
    ]

    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        for row, piece in zip(rows, ("Hm", "It", None, None), strict=True):
            details = None if piece is None else RowDetails(0, named([(piece, 0)], 0))
            sink.on_row(0, "", 1, RowExtras(details=details, events=row))
            await asyncio.sleep(rest_s)
        sink.on_row(0, "!", 1, RowExtras(end=End(0, EndReason.STOP, reasoning_tokens=2)))

    async def use(client: Client) -> None:
        body = {**BODIES[CHAT], "logprobs": True}
        await fold_and_compare(client, CHAT, body)
        _, whole, _ = await client.post(CHAT, body)
        (choice,) = whole["choices"]
        assert choice["message"] == {
            "role": "assistant",
            "content": "It!",
            "refusal": None,
            "reasoning": "Hm, so",
            "reasoning_content": "Hm, so",
            "tool_calls": [
                {
                    "id": "call-1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city":"Oslo"}'},
                },
                {
                    "id": "call-2",
                    "type": "function",
                    "function": {"name": "now", "arguments": "{}"},
                },
            ],
        }
        assert [one["token"] for one in choice["logprobs"]["content"]] == ["Hm", "It"]
        assert choice["finish_reason"] == "tool_calls"
        assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}

    run(use, script)


def test_what_an_api_has_no_place_for_ends_its_request_with_an_error() -> None:
    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        await asyncio.sleep(0.02)
        with pytest.raises(TypeError, match="ToolCallOpened has no place in a completion"):
            sink.on_row(0, "", 1, RowExtras(events=list(CALL), end=STOP))
        # What the ledger does then.
        sink.on_rejected(rejected(500, "the frontend failed", kind="server_error"))

    async def use(client: Client) -> None:
        events = await client.events(TEXT, {"prompt": "x"})
        assert events[-1]["error"]["type"] == "server_error"

    run(use, script)


# --- a dialect of another package


class VectorDialect:
    """A made-up API: a text in, its vector out, errors in its own shape."""

    name = "vectors"
    routes: tuple[str, ...] = ("/v9/vector",)

    def parse(
        self, raw: bytes, models: list[ServedModel], pause: Pause | None = None
    ) -> GenerateRequest:
        body = decode_object(raw)
        if "text" not in body:
            raise bad_request("text is missing", param="text")
        return GenerateRequest(
            model=models[0].name,
            served=models[0].name,
            prompts=[PromptText(body["text"])],
            task="embed",
        )

    def renderer(self, request: GenerateRequest, answer_id: str, created: int) -> VectorDialect:
        return self

    def body(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        (vector,) = answers[0].events()
        assert isinstance(vector, Vector)
        return json.dumps({"vector": array("f", vector.values).tolist()}).encode()

    def error(self, error: ApiError) -> bytes:
        return json.dumps({"fault": error.message}).encode()


async def embed(work: Work, sink: Sink) -> None:
    sink.on_accepted(1)
    assert isinstance(work.prompt, PromptText) and work.head.task == "embed"
    values = array("f", [len(work.prompt.text), 0.5]).tobytes()
    sink.on_row(0, "", 0, RowExtras(end=STOP, events=[Vector(values)]))


def install(folder: Path, source: str, *entries: str) -> None:
    """What an installer leaves in a folder of ``sys.path``: a module and its metadata."""
    (folder / "acme_dialects.py").write_text(source)
    info = folder / "acme_dialects-2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-dialects\nVersion: 2.5\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n" + "\n".join(entries))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages, searched by this process for the length of a test."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(importlib.import_module("sys").modules, "acme_dialects", raising=False)
    importlib.invalidate_caches()
    return tmp_path


def test_a_dialect_of_an_installed_package_is_served_beside_the_others(site: Path) -> None:
    install(site, f"from {__name__} import VectorDialect", "vectors=acme_dialects:VectorDialect")
    dialects = load_dialects()
    assert [one.name for one in dialects] == [*(one.name for one in BUILT_IN), "vectors"]

    async def main() -> None:
        gateway = ScriptedGateway(embed)
        async with serving(gateway, ServerConfig(), dialects=dialects) as client:
            status, answer, _ = await client.post("/v9/vector", {"text": "four"})
            assert (status, answer) == (200, {"vector": [4.0, 0.5]})
            status, answer, _ = await client.post("/v9/vector", {})
            assert (status, answer) == (400, {"fault": "text is missing"})
            gateway.script = say("a")
            status, answer, _ = await client.post(TEXT, {"prompt": "x"})
            assert answer["choices"][0]["text"] == "a"
            async with aiohttp.ClientSession() as session:
                url = client.url + "/v9/vector"
                async with session.get(url, headers=JSON) as response:
                    assert response.status == 405

    asyncio.run(main())


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("class Dialect: name = 'x'", "without routes, parse, renderer, error"),
    ],
)
def test_a_package_that_delivers_no_dialect_is_named_with_the_cause(
    site: Path, source: str, words: str
) -> None:
    install(site, source, "acme=acme_dialects:Dialect")
    with pytest.raises(ConfigError) as caught:
        load_dialects()
    for part in ("the dialect 'acme'", "acme-dialects 2.5", words):
        assert part in str(caught.value)


def test_a_dialect_may_not_take_the_route_of_another(site: Path) -> None:
    name = type(BUILT_IN[0]).__name__
    source = f"from {type(BUILT_IN[0]).__module__} import {name} as Dialect"
    install(site, source, "acme=acme_dialects:Dialect")
    with pytest.raises(ConfigError, match=r"acme-dialects 2\.5.* takes /v1/chat/completions"):
        load_dialects()
