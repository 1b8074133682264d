"""Answers of Anthropic's Messages API: whole, in events, and as the official SDK reads them."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from support.frontend.folded_streams import check_message_events, message_events
from support.frontend.frontend_scripted import (
    MAX_MODEL_LEN,
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
from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.wire.messages.requests import Chat, Tokens, Work
from penstock.protocol.wire.messages.tokens import (
    End,
    EndReason,
    Event,
    Reasoning,
    RowStart,
    Text,
    TokenIds,
    ToolArguments,
    ToolCallOpened,
    Vector,
)
from penstock.services.frontend.bodies.anthropic_answers import (
    AnsweredMessage,
    MessageErrorBody,
    ModelInfoList,
)
from penstock.services.frontend.dialects.anthropic.messages import MessagesDialect
from penstock.services.frontend.dialects.anthropic.renderer import MessagesRenderer
from penstock.services.frontend.errors import ApiError

if TYPE_CHECKING:
    import anthropic

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
THINKS: dict[str, Any] = {"type": "adaptive"}
ASKED: dict[str, Any] = {"messages": HELLO, "max_tokens": 9, "thinking": THINKS}
STOP = End(0, EndReason.STOP)
EVERYTHING: list[Event] = [
    Reasoning("Hm, "),
    Reasoning("so\u2028."),
    Text("I "),
    Text("look 😀."),
    ToolCallOpened(0, "call_1", "weather"),
    ToolArguments(0, '{"city":'),
    ToolArguments(0, '"Oslo"}'),
    ToolCallOpened(1, "call_2", "now"),
    Reasoning("And?"),
    Text("Then."),
]


def renderer(**asked: Any) -> MessagesRenderer:
    dialect = MessagesDialect()
    models = [ServedModel("org/model", [], 4096, 1000)]
    request = dialect.parse(json.dumps({**ASKED, **asked}).encode(), models)
    return dialect.renderer(request, "0" * 32, 0)


def rows_of(events: list[Event], draw: random.Random) -> list[str | list[Event]]:
    """The events cut into rows: some of many, some empty, plain text as a string."""
    rows: list[str | list[Event]] = []
    row: list[Event] = []
    for event in events:
        if isinstance(event, Text) and not row and draw.random() < 0.7:
            rows.append(event.text)
            continue
        row.append(event)
        if draw.random() < 0.6:
            rows.append(row)
            row = []
        if draw.random() < 0.2 and not row:
            rows.append("")
    return [*rows, row] if row else rows


def streamed(made: MessagesRenderer, rows: list[str | list[Event]], end: End = STOP) -> bytes:
    """What the rows of an answer become, plain text by the short way where the stream takes it."""
    usage = Usage()
    usage.prompt = 10
    frames = made.choice(0, usage)
    found = b""
    for number, row in enumerate(rows):
        usage.completion += 1
        if isinstance(row, str) and row and number:
            found += frames.prefix + msgspec.json.encode(row) + frames.suffix
            frames.prefix = frames.later
            continue
        if number == 0:
            usage.cached = 4
        answer = Answer()
        answer.add(
            row if isinstance(row, str) else "",
            RowExtras(events=None if isinstance(row, str) else row),
        )
        found += frames.render(answer)
    usage.reasoning = 3
    answer = Answer()
    answer.add("", RowExtras(end=end))
    return found + frames.render(answer) + made.last(usage)


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that events add up to."""
    message: dict[str, Any] = {}
    arguments = ""
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                message["content"].append(event["content_block"])
                arguments = ""
            case "content_block_delta":
                block, delta = message["content"][event["index"]], dict(event["delta"])
                if delta.pop("type") == "input_json_delta":
                    arguments += delta["partial_json"]
                    continue
                for name, more in delta.items():
                    block[name] += more
            case "content_block_stop" if arguments:
                message["content"][event["index"]]["input"] = json.loads(arguments)
            case "message_delta":
                message |= event["delta"]
                message["usage"] = event["usage"]
    return message


@pytest.mark.parametrize("seed", range(40))
def test_however_the_events_come_the_stream_has_their_order_and_adds_up_to_the_whole_message(
    seed: int,
) -> None:
    draw = random.Random(seed)
    said = [event for event in EVERYTHING if seed < 8 or draw.random() < 0.8]
    opened = {event.index for event in said if isinstance(event, ToolCallOpened)}
    said = [one for one in said if not isinstance(one, ToolArguments) or one.index in opened]
    if 0 in opened and len([one for one in said if isinstance(one, ToolArguments)]) == 1:
        said = [one for one in said if not isinstance(one, ToolArguments)]
    made = renderer()
    events = message_events(streamed(made, rows_of(said, draw)))
    check_message_events(events)
    answer = Answer()
    answer.add("", RowExtras(events=said, end=STOP))
    usage = Usage()
    usage.prompt, usage.cached, usage.reasoning = 10, 4, 3
    usage.completion = events[-2]["usage"]["output_tokens"]
    raw = made.body([answer], usage)
    msgspec.json.decode(raw, type=AnsweredMessage)
    whole = json.loads(raw)
    assert folded(events) == whole
    assert whole["stop_reason"] == ("tool_use" if opened else "end_turn")
    assert whole["usage"] == {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": usage.completion,
        "output_tokens_details": {"thinking_tokens": 3},
    }


def test_thinking_that_is_not_shown_comes_back_to_the_model_by_its_signature() -> None:
    made = renderer(thinking={"type": "adaptive", "display": "omitted"})
    events = message_events(streamed(made, [[Reasoning("Hm, ")], [Reasoning("ü?")], "Yes"]))
    check_message_events(events)
    thought, said = folded(events)["content"]
    assert thought["thinking"] == "" and said["text"] == "Yes"
    answer = Answer()
    answer.add("", RowExtras(events=[Reasoning("Hm, ü?"), Text("Yes")], end=STOP))
    assert json.loads(made.body([answer], Usage()))["content"] == [thought, said]
    history = [*HELLO, {"role": "assistant", "content": [thought, said]}, *HELLO]
    (prompt,) = renderer(messages=history).request.prompts
    assert isinstance(prompt, Chat)
    assert json.loads(prompt.messages)[1]["reasoning_content"] == "Hm, ü?"
    signature = thought["signature"]
    for wrong in (signature[:-4], signature + "!", signature.replace(".", "")):
        thought["signature"] = wrong
        with pytest.raises(ApiError, match="signature is not that of the thinking"):
            renderer(messages=history)


def test_a_call_whose_arguments_are_no_json_keeps_what_was_written() -> None:
    for written in ('{"a": ', "[1]", "nonsense", '{"a": 1}}'):
        answer = Answer()
        events: list[Event] = [ToolCallOpened(0, "c", "f"), ToolArguments(0, written)]
        answer.add("", RowExtras(events=events, end=STOP))
        (block,) = json.loads(renderer().body([answer], Usage()))["content"]
        assert block["input"] == {"INVALID_JSON": written}


@pytest.mark.parametrize(
    ("end", "tokens", "reason", "sequence"),
    [
        (End(0, EndReason.STOP), 3, "end_turn", None),
        (End(0, EndReason.STOP, 7), 3, "end_turn", None),
        (End(0, EndReason.STOP, "##"), 3, "stop_sequence", "##"),
        (End(0, EndReason.LENGTH), 9, "max_tokens", None),
        (End(0, EndReason.LENGTH), 8, "model_context_window_exceeded", None),
    ],
)
def test_the_reason_says_what_has_ended_the_answer(
    end: End, tokens: int, reason: str, sequence: str | None
) -> None:
    usage, answer = Usage(), Answer()
    usage.completion = tokens
    answer.add("x", RowExtras(end=end))
    whole = json.loads(renderer().body([answer], usage))
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    rows: list[str | list[Event]] = ["x"] * tokens
    *_, ending, _ = message_events(streamed(renderer(), rows, end))
    delta = {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}
    assert ending["delta"] == delta


@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [(STOP, "tool_use", None), (End(0, EndReason.STOP, "##"), "stop_sequence", "##")],
)
def test_a_stop_sequence_behind_a_call_is_the_reason_so_that_the_call_is_not_executed(
    end: End, reason: str, sequence: str | None
) -> None:
    """A client's loop ends with it, as with Anthropic's own; see the tool runners of its SDKs."""
    events: list[Event] = [ToolCallOpened(0, "c", "f"), ToolArguments(0, "{}"), Text("So")]
    answer = Answer()
    answer.add("", RowExtras(events=events, end=end))
    whole = json.loads(renderer().body([answer], Usage()))
    assert [block["type"] for block in whole["content"]] == ["tool_use", "text"]
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    *_, ending, _ = message_events(streamed(renderer(), [events], end))
    assert (ending["delta"]["stop_reason"], ending["delta"]["stop_sequence"]) == (reason, sequence)


def test_an_answer_that_says_nothing_is_a_message_without_blocks() -> None:
    events = message_events(streamed(renderer(), [""]))
    check_message_events(events)
    assert [event["type"] for event in events] == ["message_start", "message_delta", "message_stop"]


def test_a_ping_is_an_event_once_the_message_has_begun_and_a_comment_before() -> None:
    made = renderer()
    assert made.keep_alive.startswith(b":")
    frames = made.choice(0, Usage())
    assert made.keep_alive.startswith(b":")
    frames.prefix = frames.later  # a text was written the short way
    assert made.keep_alive == b'event: ping\ndata: {"type":"ping"}\n\n'


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (408, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_an_error_has_the_type_of_its_status(status: int, kind: str) -> None:
    error = ApiError(status, "No.")
    error.request_id = "req-1"
    raw = MessagesDialect().error(error)
    msgspec.json.decode(raw, type=MessageErrorBody)
    assert json.loads(raw) == {
        "type": "error",
        "error": {"type": kind, "message": "No."},
        "request_id": "req-1",
    }


def test_a_conversation_that_the_server_should_hold_is_refused_so_that_sdks_send_it() -> None:
    raw = MessagesDialect().error(ApiError(400, "No.", param="thread"))
    msgspec.json.decode(raw, type=MessageErrorBody)
    assert json.loads(raw)["error"]["details"] == {"error_code": "thread_unsupported_request"}


def test_what_has_no_place_in_a_message_is_no_answer() -> None:
    for wrong in (Vector(b""), ToolArguments(0, "{}")):
        with pytest.raises(TypeError, match="no place in a message"):
            streamed(renderer(), [[wrong]])


# --- with the official SDK, over a socket


def talk(*rows: str | list[Event], end: End = STOP, rest_s: float = 0.0) -> Script:
    """Say the rows, a token each."""

    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(10)
        for number, row in enumerate(rows):
            start = RowStart(0, 4, 0.01) if number == 0 else None
            events = None if isinstance(row, str) else row
            extras = RowExtras(start, events=events) if start or events else None
            sink.on_row(0, row if isinstance(row, str) else "", 1, extras)
            await asyncio.sleep(rest_s)
        sink.on_row(0, "", 0, RowExtras(end=end))

    return script


@pytest.fixture(scope="module", autouse=True)
def _sdk() -> None:
    """Takes seconds to import, which a process that only collects this file has no use for."""
    global anthropic
    import anthropic


def with_sdk(
    use: Callable[[anthropic.AsyncAnthropic, Client], Awaitable[None]],
    script: Script,
    config: ServerConfig | None = None,
    **how: Any,
) -> ScriptedGateway:
    async def main(client: Client) -> None:
        given = {"api_key": "right", "max_retries": 0, **how}
        async with anthropic.AsyncAnthropic(base_url=client.url, **given) as api:
            await use(api, client)

    return run(main, script, config)


@pytest.mark.parametrize("rest_s", [0.0, 0.003], ids=["at once", "token by token"])
def test_the_sdk_s_stream_adds_up_to_the_message_it_gets_whole(rest_s: float) -> None:
    async def use(api: anthropic.AsyncAnthropic, client: Client) -> None:
        asked: dict[str, Any] = {**ASKED, "model": "model"}
        whole = await api.messages.create(**asked)
        kinds = [block.type for block in whole.content]
        assert kinds == ["thinking", "text", "tool_use", "tool_use"]
        assert whole.content[2].to_dict() == {
            "type": "tool_use",
            "id": "call_1",
            "name": "weather",
            "input": {"city": "Oslo"},
        }
        assert (whole.model, whole.role, whole.stop_reason) == ("model", "assistant", "tool_use")
        assert whole.id.startswith("msg_") and whole._request_id
        async with api.messages.stream(**asked) as stream:
            said = "".join([text async for text in stream.text_stream])
            final = await stream.get_final_message()
        assert said == "I look 😀. at it"
        left, right = final.to_dict(), whole.to_dict()
        assert left.pop("id") != right.pop("id")
        assert left == right
        again = [*HELLO, {"role": "assistant", "content": final.content}]
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "1"}
            for block in final.content
            if block.type == "tool_use"
        ]
        await api.messages.create(
            **{**asked, "messages": [*again, {"role": "user", "content": results}]}
        )

    rows = [[EVENT] for EVENT in EVERYTHING[:2]]
    calls: list[str | list[Event]] = [list(EVERYTHING[4:6]), list(EVERYTHING[6:8])]
    with_sdk(use, talk(*rows, "I ", "look 😀.", " at", " it", *calls, rest_s=rest_s))


def test_tokens_are_counted_and_models_listed_in_the_sdk_s_shape() -> None:
    async def script(work: Work, sink: Sink) -> None:
        assert work.head.task == "tokenize"
        sink.on_accepted(17)
        sink.on_row(0, "", 0, RowExtras(end=STOP, events=[TokenIds(bytes(4 * 17))]))

    async def use(api: anthropic.AsyncAnthropic, client: Client) -> None:
        counted = await api.messages.count_tokens(model="alias", messages=HELLO)
        assert counted.input_tokens == 17
        models = [model async for model in api.models.list()]
        assert [model.id for model in models] == ["org/model", "alias", "model"]
        assert models[0].max_tokens == MAX_MODEL_LEN
        assert models[0].created_at.year >= 2024
        assert (await api.models.retrieve("org/model")).display_name == "org/model"
        with pytest.raises(anthropic.NotFoundError, match="'none' does not exist"):
            await api.models.retrieve("none")
        headers = {"anthropic-version": "2023-06-01"}
        async with client.session.get(f"{client.url}/v1/models", headers=headers) as response:
            msgspec.json.decode(await response.read(), type=ModelInfoList)
        _, plain, _ = await client.get("/v1/models")
        assert [card["id"] for card in plain["data"]] == ["org/model", "alias"]

    gateway = with_sdk(use, script)
    assert not any(isinstance(work.prompt, Tokens) for work in gateway.works)


def test_errors_become_the_exceptions_of_the_sdk() -> None:
    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        sink.on_row(0, "begun", 1)
        await asyncio.sleep(0.02)
        sink.on_rejected(rejected(503, "engine lost", kind="server_error"))

    async def use(api: anthropic.AsyncAnthropic, client: Client) -> None:
        asked: dict[str, Any] = {**ASKED, "model": "model"}
        with pytest.raises(anthropic.BadRequestError, match="temperature is -1") as bad:
            await api.messages.create(**asked, extra_body={"temperature": -1})
        body: Any = bad.value.body
        assert body["error"]["type"] == "invalid_request_error"
        assert (
            body["request_id"] == bad.value.request_id == bad.value.response.headers["request-id"]
        )
        with pytest.raises(anthropic.NotFoundError):
            await api.messages.create(**{**asked, "model": "none"})
        with pytest.raises(anthropic.APIStatusError, match="engine lost") as lost:
            await api.messages.create(**asked)
        assert lost.value.status_code == 503
        with pytest.raises(anthropic.APIStatusError, match=r"overloaded_error.*engine lost"):
            async with api.messages.stream(**asked) as stream:
                await stream.until_done()
        with pytest.raises(anthropic.NotFoundError) as nothing:
            await api.messages.batches.list()
        assert nothing.value.body["type"] == "error"  # type: ignore[index, call-overload]
        async with anthropic.AsyncAnthropic(
            base_url=client.url, api_key="wrong", max_retries=0
        ) as other:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await other.messages.create(**asked)
            assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index, call-overload]
        async with anthropic.AsyncAnthropic(
            base_url=client.url, auth_token="right", max_retries=0
        ) as bearer:
            assert [model.id async for model in bearer.models.list()]

    with_sdk(use, script, ServerConfig(api_key=["right"]))


def test_a_silent_stream_is_kept_alive_by_pings() -> None:
    comment_came, ping_came = asyncio.Event(), asyncio.Event()

    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        await comment_came.wait()
        sink.on_row(0, "a", 1, RowExtras(RowStart(0, 0, 0.0)))
        await ping_came.wait()
        sink.on_row(0, "b", 1, RowExtras(end=STOP))

    async def use(client: Client) -> None:
        data, raw = json.dumps({**ASKED, "stream": True}), b""
        async with client.session.post(f"{client.url}/v1/messages", data=data) as response:
            async for chunk in response.content.iter_any():
                raw += chunk
                if b": keep-alive\n\n" in raw:
                    comment_came.set()
                if b"event: ping\n" in raw:
                    ping_came.set()
        before, _, after = raw.partition(b"event: message_start")
        assert before.startswith(b": keep-alive\n\n") and b"ping" not in before
        assert b'event: ping\ndata: {"type":"ping"}\n\n' in after and b": keep-alive" not in after
        events = message_events(raw)
        check_message_events(events)
        assert folded(events)["content"] == [{"type": "text", "text": "ab"}]

    run(use, script, ServerConfig(keep_alive_comment_s=0.04))


def test_plain_texts_of_a_stream_come_as_they_were_said() -> None:
    async def use(client: Client) -> None:
        data = json.dumps({**ASKED, "stream": True})
        async with client.session.post(f"{client.url}/v1/messages", data=data) as response:
            assert response.content_type == "text/event-stream"
            events = message_events(await response.read())
        check_message_events(events)
        assert folded(events)["content"] == [{"type": "text", "text": "a\u2028b c"}]

    run(use, say("a\u2028", "b", " c"))


def test_a_body_s_own_beta_query_and_headers_change_nothing() -> None:
    async def main() -> None:
        async with serving(ScriptedGateway(say("a"))) as client:
            headers = {"anthropic-beta": "interleaved-thinking-2025-05-14", "x-api-key": "any"}
            status, answer, response = await client.post(
                "/v1/messages?beta=true", ASKED, headers=headers
            )
            assert (status, answer["content"]) == (200, [{"type": "text", "text": "a"}])
            assert response.headers["request-id"] == response.headers["x-request-id"]

    asyncio.run(main())
