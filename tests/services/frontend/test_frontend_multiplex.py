"""/v1/stream: what is sent, what comes back, and what is refused."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import msgspec
import pytest
from support.frontend.frontend_scripted import LENGTH, STOP, Client, rejected, say
from support.frontend.multiplex_client import HI, Socket, said, talk, text, until_told
from support.frontend.tokenized_script import writes

from penstock.client.sink import RowExtras, Sink
from penstock.protocol.logprobs import NamedLogprobs
from penstock.protocol.wire.messages.requests import Chat, Tokens, Work
from penstock.protocol.wire.messages.tokens import (
    Reasoning,
    RowDetails,
    Text,
    ToolArguments,
    ToolCallOpened,
)
from penstock.services.frontend.dialects.multiplex.encodings import MAX_PACKED_BYTES


@pytest.mark.parametrize("packs", [False, True])
def test_a_chat_and_a_completion_come_as_deltas_and_one_end(packs: bool) -> None:
    async def use(client: Client, socket: Socket) -> None:
        socket.packs = packs
        await socket.chat("a", max_tokens=5, user="u")
        frames = await socket.frames("a")
        assert frames[:-1] == [
            {"id": "a", "type": "text", "text": "Hello"},
            {"id": "a", "type": "text", "text": " wörld"},
        ]
        end = frames[-1]
        assert end.pop("request_id").endswith("-1")
        assert end == {
            "id": "a",
            "type": "end",
            "model": "org/model",
            "choices": [{"finish_reason": "stop", "stop_reason": None}],
            "usage": {
                "prompt_tokens": 3,
                "completion_tokens": 2,
                "total_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
        }
        work = client.gateway.works[0]
        assert isinstance(work.prompt, Chat) and work.head.tenant == "u" and work.head.streamed
        assert work.params.max_tokens == 5
        await socket.complete("a", [1, 2, 3], model="alias", stream=True)
        assert text(await socket.frames("a")) == "Hello wörld"
        assert isinstance(client.gateway.works[1].prompt, Tokens)

    talk(use, say("Hello", " wörld"))


def test_requests_are_interleaved_and_each_has_its_own_frames() -> None:
    turn = asyncio.Event()

    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        sink.on_row(0, f"{said(work)} begins", 1)
        if said(work) == "slow":
            await turn.wait()
        sink.on_row(0, ", ends", 1, RowExtras(end=STOP))

    async def use(client: Client, socket: Socket) -> None:
        await socket.complete("1", "slow")
        await socket.complete("2", "quick")
        await socket.chat("3", "quick")
        assert text(await socket.frames("3")) == "quick begins, ends"
        assert text(await socket.frames("2")) == "quick begins, ends"
        assert [one["text"] for one in socket.passed] == ["slow begins"]
        turn.set()
        assert text(await socket.frames("1")) == "slow begins, ends"

    talk(use, script)


@pytest.mark.parametrize("packs", [False, True])
def test_every_kind_of_event_is_a_frame(packs: bool) -> None:
    seen = asyncio.Event()

    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(2)
        sink.on_row(0, "", 1, RowExtras(events=[Reasoning("think")]))
        await seen.wait()  # what comes before the stream has begun is joined
        opened = [Text("So: "), ToolCallOpened(0, "call-1", "weather"), ToolArguments(0, '{"a"')]
        sink.on_row(0, "", 1, RowExtras(events=opened))
        sink.on_row(1, "other", 1)
        sink.on_row(0, "", 1, RowExtras(events=[ToolArguments(0, ":1}")], end=STOP))
        sink.on_row(1, "", 1, RowExtras(end=LENGTH))

    async def use(client: Client, socket: Socket) -> None:
        socket.packs = packs
        function = {"name": "weather", "parameters": {"type": "object"}}
        await socket.chat("x", n=2, tools=[{"type": "function", "function": function}])
        socket.passed.append(await socket.frame())
        seen.set()
        *frames, end = await socket.frames("x")
        assert [one for one in frames if "choice" not in one] == [
            {"id": "x", "type": "reasoning", "text": "think"},
            {"id": "x", "type": "text", "text": "So: "},
            {"id": "x", "type": "tool_call", "index": 0, "call_id": "call-1", "name": "weather"},
            {"id": "x", "type": "arguments", "index": 0, "text": '{"a"'},
            {"id": "x", "type": "arguments", "index": 0, "text": ":1}"},
        ]
        assert [one for one in frames if "choice" in one] == [
            {"id": "x", "type": "text", "choice": 1, "text": "other"}
        ]
        assert [one["finish_reason"] for one in end["choices"]] == ["tool_calls", "length"]

    talk(use, script)


@pytest.mark.parametrize("packs", [False, True])
def test_logprobs_and_running_usage_are_those_of_a_stream_over_http(packs: bool) -> None:
    entry = array("i", [7, 1]).tobytes() + array("f", [-0.5]).tobytes()
    named = NamedLogprobs(0, entry, [b"a"], [0])

    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(2)
        sink.on_row(0, "a", 1, RowExtras(details=RowDetails(0, named)))
        sink.on_row(0, "", 1, RowExtras(details=RowDetails(0, named)))
        sink.on_row(0, "b", 1, RowExtras(end=STOP))

    async def use(client: Client, socket: Socket) -> None:
        socket.packs = packs
        asks = {"logprobs": True, "stream_options": {"continuous_usage_stats": True}}
        await socket.chat("c", **asks)
        *frames, _ = await socket.frames("c")
        *events, _ = await client.events("/v1/chat/completions", {**HI, **asks})
        choices = [one["choices"][0] for one in events]
        assert [one["logprobs"] for one in choices] == [one.get("logprobs") for one in frames]
        assert [one["usage"] for one in events] == [one["usage"] for one in frames]
        assert text(frames) == "ab"
        await socket.complete("t", "x", logprobs=0)
        *frames, _ = await socket.frames("t")
        *events, _ = await client.events("/v1/completions", {"prompt": "x", "logprobs": 0})
        listed = [one["choices"][0]["logprobs"] for one in events]
        assert listed == [one.get("logprobs") for one in frames]
        assert "usage" not in frames[0]

    talk(use, script)


def test_ids_stand_beside_the_text_where_they_are_asked_for() -> None:
    def ids(*tokens: int) -> bytes:
        return array("i", tokens).tobytes()

    async def script(work: Work, sink: Sink) -> None:
        assert sink.wants_ids
        sink.on_accepted(2)
        sink.on_row(0, "a", 1, RowExtras(ids=ids(5), prompt=ids(1, 2)))
        await asyncio.sleep(0.01)
        sink.on_row(0, "", 1, RowExtras(ids=ids(6), end=STOP))

    async def use(client: Client, socket: Socket) -> None:
        await socket.complete("i", "x", return_token_ids=True)
        *frames, _ = await socket.frames("i")
        assert text(frames) == "a"
        assert [token for one in frames for token in one["token_ids"]] == [5, 6]
        assert frames[0]["prompt_token_ids"] == [1, 2]

    talk(use, script)


WRONG: list[tuple[str, str, Any]] = [
    ("chat", "/v1/chat/completions", {"messages": []}),
    ("chat", "/v1/chat/completions", {"messages": [{"role": "king", "content": "x"}]}),
    ("chat", "/v1/chat/completions", {**HI, "temprature": 1}),
    ("chat", "/v1/chat/completions", {**HI, "model": "other"}),
    ("chat", "/v1/chat/completions", {**HI, "temperature": -1, "n": 1000}),
    ("completion", "/v1/completions", {}),
    ("completion", "/v1/completions", {"prompt": [5000]}),
    ("completion", "/v1/completions", {"prompt": list(range(100))}),
    ("completion", "/v1/completions", {"prompt": "x", "best_of": 2, "logit_bias": {"x": 1}}),
    ("completion", "/v1/completions", {"prompt": "x", "prompt_logprobs": 1, "stream": True}),
    ("completion", "/v1/completions", [1]),
]


def test_a_wrong_body_is_refused_as_over_http() -> None:
    async def use(client: Client, socket: Socket) -> None:
        for packs in (False, True):
            socket.packs = packs
            for kind, path, body in WRONG:
                status, answer, _ = await client.post(path, body)
                await socket.send(id="w", type=kind, body=body)
                error = await socket.error("w")
                assert (error["status"], error["error"]) == (status, answer["error"]), body
        await socket.chat("w")
        assert (await socket.frames("w"))[-1]["type"] == "end"

    talk(use)


def test_an_answer_that_is_whole_is_refused_by_name() -> None:
    async def use(client: Client, socket: Socket) -> None:
        await socket.chat("a", stream=False)
        error = await socket.error("a")
        assert error["error"]["param"] == "stream" and "pieces" in error["error"]["message"]

    talk(use)


@pytest.mark.parametrize(
    ("frame", "name", "words"),
    [
        ("{", None, "no object in JSON"),
        ("[]", None, "no object in JSON"),
        ("[" * 100_000, None, "no object in JSON"),
        ('{"type": "chat", "body": {}}', None, "id is missing"),
        ('{"id": "", "type": "chat"}', None, "1 to 64"),
        ('{"id": 5, "type": "chat"}', None, "id is 5"),
        ('{"id": "%s", "type": "chat"}' % ("x" * 65), None, "1 to 64"),
        ('{"id": "a", "body": {}}', None, "type is missing"),
        ('{"id": "a", "type": "chats", "body": {}}', "a", "'chats'"),
        ('{"id": "a", "type": ["chat"], "body": {}}', "a", "type is"),
        ('{"id": "a", "type": "chat"}', "a", "body is missing"),
        ('{"id": "a", "type": "chat", "body": 5}', "a", "must be a JSON object"),
        ('{"id": "a", "type": "chat", "boddy": {}}', None, "did you mean body"),
        ('{"id": "a", "type": "chat", "body": %s}' % ("[" * 70 + "]" * 70), "a", "nested"),
        ('{"id": "a", "type": "cancel"}', None, "nothing runs"),
        ('{"id": "a", "type": "cancel", "body": {}}', None, "no place"),
        (b"\x93", None, "no object in msgpack"),
        (b"\xc1", None, "no object in msgpack"),
        (b"\x91" * 100_000, None, "no object in msgpack"),
        (bytes(MAX_PACKED_BYTES + 1), None, "1048576"),
    ],
)
def test_a_wrong_frame_is_an_error_and_the_connection_goes_on(
    frame: str | bytes, name: str | None, words: str
) -> None:
    async def use(client: Client, socket: Socket) -> None:
        socket.packs = isinstance(frame, bytes)
        if isinstance(frame, bytes):
            await socket.raw.send_bytes(frame)
        else:
            await socket.raw.send_str(frame)
        error = await socket.error(name)
        assert error["status"] in (400, 413) and words in error["error"]["message"]
        await socket.chat("a")
        assert text(await socket.frames("a")) == "Hello world"

    talk(use)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (b"raw", "bytes"),
        (msgspec.msgpack.Ext(5, b"x"), "Ext"),
        ({b"k": 1}, "the key"),
        ({True: 1}, "the key"),
    ],
)
def test_what_json_does_not_know_is_refused_in_msgpack(value: Any, words: str) -> None:
    async def use(client: Client, socket: Socket) -> None:
        socket.packs = True
        await socket.complete("a", "x", temperature=value)
        error = await socket.error("a")
        assert words in error["error"]["message"] and error["error"]["param"] == "body"
        await socket.complete("a", "x", logit_bias={5: 1.0})  # numbers may be keys there
        assert (await socket.frames("a"))[-1]["type"] == "end"
        assert client.gateway.works[0].params.logit_bias == {5: 1.0}

    talk(use)


def test_a_cancelled_request_ends_with_what_has_come() -> None:
    async def use(client: Client, socket: Socket) -> None:
        await socket.chat("a", "long")
        await socket.chat("b", "long")
        while len(socket.passed) < 2:
            socket.passed.append(await socket.frame())
        await socket.cancel("a")
        *frames, end = await socket.frames("a")
        assert text(frames) == "re: long"
        assert end["choices"] == [{"finish_reason": "cancelled", "stop_reason": None}]
        assert end["usage"]["completion_tokens"] == 1
        assert client.gateway.cancelled == [1]
        await socket.cancel("a")
        assert (await socket.error())["error"]["code"] == "unknown_id"
        await socket.chat("a", "again")
        assert text(await socket.frames("a")) == "re: again."

    talk(use, until_told)


@pytest.mark.parametrize("row", [1, 3, 1000])
@pytest.mark.parametrize("shown", [True, False])
def test_a_cancelled_request_says_how_much_was_thought_whether_it_is_shown_or_not(
    shown: bool, row: int
) -> None:
    written = asyncio.Event()

    async def use(client: Client, socket: Socket) -> None:
        await socket.chat("a", include_reasoning=shown)
        await written.wait()
        await socket.cancel("a")
        *frames, end = await socket.frames("a")
        thought = "".join(one["text"] for one in frames if one["type"] == "reasoning")
        assert thought == ("17: 7 1\n25: 5 2\n2 4: 42" if shown else "")
        assert [one for one in frames if not one["text"]] == []
        usage = end["usage"]
        thinking = usage["completion_tokens_details"]["reasoning_tokens"]
        assert 0 < usage["completion_tokens"] - 3 < thinking <= usage["completion_tokens"]

    script = writes("<think>\n17: 7 1\n25: 5 2\n2 4: 42", row=row, ends=False, written=written)
    talk(use, script)


def test_a_request_can_be_cancelled_before_it_has_begun() -> None:
    async def never(work: Work, sink: Sink) -> None:
        await asyncio.sleep(3600)

    async def use(client: Client, socket: Socket) -> None:
        await socket.chat("a")
        await socket.cancel("a")
        (end,) = await socket.frames("a")
        assert end["choices"] == [{"finish_reason": "cancelled", "stop_reason": None}]

    talk(use, never)


def test_an_id_that_runs_is_refused_and_its_request_goes_on() -> None:
    async def use(client: Client, socket: Socket) -> None:
        await socket.chat("a", "long")
        await socket.chat("a", "other")
        error = await socket.error()
        assert error["error"]["code"] == "duplicate_id" and "'a'" in error["error"]["message"]
        await socket.send(id="a", type="chats", body={})
        await socket.error()
        await socket.cancel("a")
        assert text(await socket.frames("a")) == "re: long"

    talk(use, until_told)


def test_errors_of_the_pipeline_end_their_request_alone() -> None:
    async def script(work: Work, sink: Sink) -> None:
        if said(work) == "full":
            sink.on_rejected(rejected(503, "full", kind="overloaded_error", retry_after=2.0))
            return
        sink.on_accepted(1)
        sink.on_row(0, "begun", 1)
        await asyncio.sleep(0.01)
        if said(work) == "lost":
            sink.on_rejected(rejected(500, "engine lost", kind="server_error"))
        else:
            sink.on_row(0, ".", 1, RowExtras(end=STOP))

    async def use(client: Client, socket: Socket) -> None:
        for name in ("full", "lost", "well"):
            await socket.chat(name, name)
        error = await socket.error("full")
        assert (error["status"], error["retry_after_s"]) == (503, 2)
        begun, error = await socket.frames("lost")
        assert begun["text"] == "begun" and error["error"]["message"] == "engine lost"
        assert text(await socket.frames("well")) == "begun."

    talk(use, script)


def test_texts_of_every_size_are_whole_messages() -> None:
    texts = ["x" * size for size in (1, 40, 90, 125, 126, 127, 65_500, 65_536, 70_000)]

    async def use(client: Client, socket: Socket) -> None:
        for packs in (False, True):
            socket.packs = packs
            await socket.complete("sizes", "x")
            *frames, _ = await socket.frames("sizes")
            assert [one["text"] for one in frames] == texts

    talk(use, say(*texts))
