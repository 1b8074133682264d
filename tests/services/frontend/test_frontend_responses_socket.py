"""The Responses API over a WebSocket: lanes, what a connection remembers, steering, limits."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp
import pytest
from frontend_scripted import STOP, Client, Script, ScriptedGateway, rejected, run, say
from openai.types.responses import ResponsesServerEvent
from pydantic import TypeAdapter

from penstock.client.sink import RowExtras, Sink
from penstock.protocol.config.fields import ServerConfig
from penstock.protocol.process import logs
from penstock.protocol.wire.messages.requests import Chat, Work
from penstock.protocol.wire.messages.tokens import ToolArguments, ToolCallOpened
from penstock.services.frontend.context import CONTEXT
from penstock.services.frontend.dialects.responses import session as sessions
from penstock.services.frontend.dialects.responses.state import RESPONSES

PATH = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)
ENDS = ("response.completed", "response.incomplete", "response.failed")


class Socket:
    """A client's end."""

    def __init__(self, raw: aiohttp.ClientWebSocketResponse) -> None:
        self.raw = raw

    async def create(self, **body: Any) -> None:
        await self.raw.send_str(json.dumps({"type": "response.create", **body}))

    async def steer(self, target: str, text: str) -> None:
        steer = {"type": "response.steer", "previous_response_id": target, "input": text}
        await self.raw.send_str(json.dumps(steer))

    async def event(self) -> dict[str, Any]:
        """The next event, as the SDK's types demand it."""
        event: dict[str, Any] = json.loads(await self.raw.receive_str())
        EVENT.validate_python(event)
        return event

    async def until(self, *kinds: str) -> list[dict[str, Any]]:
        found = [await self.event()]
        while found[-1]["type"] not in kinds:
            found.append(await self.event())
        return found

    async def answer(self, **body: Any) -> dict[str, Any]:
        """The response that a request ends with."""
        await self.create(**body)
        events = await self.until(*ENDS, "error")
        assert events[-1]["type"] in ENDS, events[-1]
        return cast(dict[str, Any], events[-1]["response"])

    async def error(self, **body: Any) -> dict[str, Any]:
        await self.create(**body)
        (event,) = await self.until("error", *ENDS)
        return event

    async def closed(self) -> int | None:
        message = await self.raw.receive()
        assert message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED), message
        return self.raw.close_code


@asynccontextmanager
async def connected(client: Client, **kwargs: Any) -> AsyncIterator[Socket]:
    async with client.session.ws_connect(client.url + PATH, **kwargs) as raw:
        yield Socket(raw)


def talk(
    use: Callable[[Client, Socket], Awaitable[None]],
    script: Script | None = None,
    config: ServerConfig | None = None,
    *,
    stall_s: float = 60.0,
) -> ScriptedGateway:
    async def with_socket(client: Client) -> None:
        async with connected(client) as socket:
            await use(client, socket)

    return run(with_socket, script, config, stall_s=stall_s)


def messages(work: Work) -> list[dict[str, Any]]:
    assert isinstance(work.prompt, Chat)
    found: list[dict[str, Any]] = json.loads(work.prompt.messages)
    return found


def text(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


def test_events_are_those_of_a_stream_and_name_their_lane() -> None:
    async def use(client: Client, socket: Socket) -> None:
        await socket.create(input="hi", stream_id="a%d", stream=True)
        events = await socket.until("response.completed")
        assert [one["sequence_number"] for one in events] == list(range(len(events)))
        assert {one["stream_id"] for one in events} == {"a%d"}
        kinds = [one["type"] for one in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert "".join(one["delta"] for one in events if "delta" in one) == "Hello world"
        assert text(events[-1]["response"]) == "Hello world"
        await socket.create(input="hi")
        assert "stream_id" not in (await socket.until("response.completed"))[-1]

    talk(use)


def test_a_connection_remembers_its_responses_without_a_store() -> None:
    async def use(client: Client, socket: Socket) -> None:
        first = await socket.answer(input="one", store=False)
        second = await socket.answer(
            input="two", store=False, previous_response_id=first["id"], instructions="Be kind."
        )
        assert second["store"] is False and second["previous_response_id"] == first["id"]
        said = [(one["role"], one["content"]) for one in messages(client.gateway.works[1])]
        assert said == [
            ("system", "Be kind."),
            ("user", "one"),
            ("assistant", "Hello world"),
            ("user", "two"),
        ]
        status, _, _ = await client.get(f"{PATH}/{first['id']}")
        assert status == 404
        async with connected(client) as other:
            error = await other.error(input="x", previous_response_id=first["id"])
            assert error["status"] == 400
            assert error["error"]["code"] == "previous_response_not_found"
            assert error["error"]["param"] == "previous_response_id"

    talk(use)


def test_what_a_connection_remembers_goes_with_it() -> None:
    async def use(client: Client) -> None:
        state = client.app[RESPONSES]
        async with connected(client) as socket:
            await socket.answer(input="one", store=False)
            assert len(state.local) == 1
        while state.sessions:
            await asyncio.sleep(0.01)
        assert (len(state.local), state.local.used) == (0, 0)

    run(use)


def test_stored_responses_can_be_continued_over_http_and_back() -> None:
    async def use(client: Client, socket: Socket) -> None:
        first = await socket.answer(input="one")
        _, second, _ = await client.post(
            PATH, {"input": "two", "previous_response_id": first["id"]}
        )
        await socket.answer(input="three", previous_response_id=second["id"])
        users = [one["content"] for one in messages(client.gateway.works[2])]
        assert users == ["one", "Hello world", "two", "Hello world", "three"]

    talk(use)


def test_requests_of_one_lane_follow_each_other_and_lanes_run_at_once() -> None:
    go = asyncio.Event()

    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        if messages(work)[-1]["content"] == "slow":
            await go.wait()
        sink.on_row(0, "done", 1, RowExtras(end=STOP))

    async def use(client: Client, socket: Socket) -> None:
        await socket.create(input="slow", stream_id="a")
        await socket.create(input="quick", stream_id="a")
        await socket.create(input="quick", stream_id="b")
        events = await socket.until("response.completed")
        assert events[-1]["stream_id"] == "b"
        assert len(client.gateway.works) == 2
        go.set()
        for _ in range(2):
            events = await socket.until("response.completed")
            assert events[-1]["stream_id"] == "a"
        assert [messages(work)[-1]["content"] for work in client.gateway.works][2:] == ["quick"]

    talk(use, script)


def test_a_warm_up_computes_the_prompt_and_answers_nothing() -> None:
    async def use(client: Client, socket: Socket) -> None:
        await socket.create(input="hi", generate=False, store=False)
        events = await socket.until("response.completed")
        assert [one["type"] for one in events] == [
            "response.created",
            "response.in_progress",
            "response.completed",
        ]
        warm = events[-1]["response"]
        assert (warm["output"], warm["usage"]["output_tokens"]) == ([], 0)
        assert warm["usage"]["input_tokens"] == 3
        assert client.gateway.works[0].params.max_tokens == 1
        await socket.answer(input="and?", previous_response_id=warm["id"])
        assert [one["content"] for one in messages(client.gateway.works[1])] == ["hi", "and?"]

    talk(use)


async def until_cancelled(work: Work, sink: Sink) -> None:
    sink.on_accepted(1)
    said = messages(work)[-1]["content"]
    sink.on_row(0, f"re: {said}", 1)
    if said == "long":
        await asyncio.sleep(60)
    sink.on_row(0, ".", 1, RowExtras(end=STOP))


def test_steering_ends_a_message_and_another_response_continues_it() -> None:
    async def use(client: Client, socket: Socket) -> None:
        await socket.create(input="long", stream_id="x", temperature=0.5)
        target = (await socket.until("response.output_text.delta"))[0]["response"]["id"]
        await socket.steer(target, "short, please")
        accepted, *_, incomplete = await socket.until("response.incomplete")
        assert accepted["type"] == "response.steer.accepted"
        assert accepted["steer"]["previous_response_id"] == target
        assert incomplete["response"]["incomplete_details"] == {"reason": "steered"}
        assert incomplete["response"]["output"][0]["status"] == "incomplete"
        created, *_, completed = await socket.until("response.completed")
        assert created["response"]["previous_response_id"] == target
        assert created["stream_id"] == "x" and created["response"]["temperature"] == 0.5
        assert text(completed["response"]) == "re: short, please."
        said = [one["content"] for one in messages(client.gateway.works[1])]
        assert said == ["long", "re: long", "short, please"]
        assert client.gateway.cancelled == [1]

    talk(use, until_cancelled)


def test_steering_waits_for_the_results_of_tools() -> None:
    go = asyncio.Event()

    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        if len(messages(work)) > 1:
            sink.on_row(0, "sunny", 1, RowExtras(end=STOP))
            return
        sink.on_row(0, "", 1, RowExtras(events=[ToolCallOpened(0, "call-1", "weather")]))
        await go.wait()
        sink.on_row(0, "", 1, RowExtras(events=[ToolArguments(0, "{}")], end=STOP))

    async def use(client: Client, socket: Socket) -> None:
        tools = [{"type": "function", "name": "weather"}]
        await socket.create(input="weather?", tools=tools)
        target = (await socket.until("response.output_item.added"))[0]["response"]["id"]
        await socket.steer(target, "in Rome")
        await socket.until("response.steer.accepted")
        go.set()
        *_, completed, pending = await socket.until("response.steer.pending")
        assert completed["type"] == "response.completed"
        wanted = {"type": "function_call_output", "call_id": "call-1", "name": "weather"}
        assert pending["required_input"] == [wanted]
        output = {"type": "function_call_output", "call_id": "call-1", "output": "20 degrees"}
        await socket.answer(input=[output], previous_response_id=target)
        roles = [(one["role"], one["content"]) for one in messages(client.gateway.works[1])]
        assert roles[2:] == [("tool", "20 degrees"), ("user", "in Rome")]

    talk(use, script)


def test_steering_that_comes_to_nothing_gives_its_input_back() -> None:
    async def use(client: Client, socket: Socket) -> None:
        async def failed(target: str, text: str) -> tuple[str, Any]:
            await socket.steer(target, text)
            (event,) = await socket.until("response.steer.failed")
            return event["error"]["code"], event["steer"]["input"]

        done = await socket.answer(input="one")
        assert await failed(done["id"], "x") == ("response_already_completed", "x")
        assert await failed("resp_no", "y") == ("response_not_found", "y")
        assert await failed("resp_no", "") == ("invalid_input", "")

    talk(use)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ("{", "not a JSON object"),
        ("[]", "not a JSON object"),
        ('{"type": "response.cancel"}', "'response.cancel'"),
        ('{"type": "response.create", "input": "x", "background": true}', "background"),
        ('{"type": "response.create", "input": "x", "stream_id": ""}', "stream_id"),
        ('{"type": "response.create", "input": "x", "temprature": 1}', "temprature"),
        ('{"type": "response.create"}', "input is missing"),
    ],
)
def test_a_wrong_message_is_an_error_and_the_connection_goes_on(sent: str, words: str) -> None:
    async def use(client: Client, socket: Socket) -> None:
        await socket.raw.send_str(sent)
        (error,) = await socket.until("error")
        assert error["status"] == 400 and words in error["error"]["message"]
        assert text(await socket.answer(input="x")) == "Hello world"

    talk(use)


def test_errors_of_the_pipeline_are_errors_of_the_request() -> None:
    async def script(work: Work, sink: Sink) -> None:
        if messages(work)[-1]["content"] == "full":
            sink.on_rejected(rejected(503, "full", kind="overloaded_error", retry_after=2.0))
            return
        sink.on_accepted(1)
        sink.on_row(0, "begun", 1)
        await asyncio.sleep(0.01)
        sink.on_rejected(rejected(500, "engine lost", kind="server_error"))

    async def use(client: Client, socket: Socket) -> None:
        error = await socket.error(input="full", stream_id="z")
        assert error["stream_id"] == "z" and error["status"] == 503
        assert error["error"]["headers"] == {"Retry-After": "2"}
        await socket.create(input="x")
        *_, error, failed = await socket.until("response.failed")
        assert error["error"]["message"] == "engine lost"
        assert failed["response"]["error"] == {"code": "server_error", "message": "engine lost"}

    talk(use, script)


def test_lanes_and_waiting_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_LANES", 2)
    monkeypatch.setattr(sessions, "MAX_WAITING", 3)

    async def use(client: Client, socket: Socket) -> None:
        for lane in ("a", "b", "a"):
            await socket.create(input="long", stream_id=lane)
        await socket.create(input="x", stream_id="c")
        *_, error = await socket.until("error")
        assert error["error"]["code"] == "websocket_queue_full" and "2 lanes" in error["message"]
        await socket.create(input="x", stream_id="a")
        *_, error = await socket.until("error")
        assert "3 requests" in error["message"]

    async def main(client: Client) -> None:
        async with connected(client) as socket:
            await use(client, socket)
        while client.app[RESPONSES].sessions:
            await asyncio.sleep(0.01)

    gateway = run(main, until_cancelled)
    assert gateway.cancelled == [1, 2]


def test_a_connection_that_goes_cancels_what_runs_and_frees_what_it_held() -> None:
    async def use(client: Client) -> None:
        async with connected(client) as socket:
            await socket.create(input="long")
            await socket.until("response.output_text.delta")
        await client.gateway.cancel_seen.wait()
        while client.app[RESPONSES].sessions:
            await asyncio.sleep(0.01)
        assert client.app[CONTEXT].bodies.used == 0
        assert client.app[RESPONSES].running == {}

    run(use, until_cancelled)


def test_a_connection_ends_when_its_time_is_over() -> None:
    async def use(client: Client) -> None:
        client.app[RESPONSES].limit_s = 0.05
        async with connected(client) as socket:
            (error,) = await socket.until("error")
            assert error["error"]["code"] == "websocket_connection_limit_reached"
            assert await socket.closed() == aiohttp.WSCloseCode.OK

    run(use)


def test_a_server_that_goes_down_lets_a_response_end_and_takes_no_other() -> None:
    go = asyncio.Event()

    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        sink.on_row(0, "a", 1)
        await go.wait()
        sink.on_row(0, "b", 1, RowExtras(end=STOP))

    async def use(client: Client, socket: Socket) -> None:
        await socket.create(input="x")
        await socket.create(input="waits")
        await socket.until("response.output_text.delta")
        client.gateway.is_draining = True
        client.app[RESPONSES].drain()
        (error,) = await socket.until("error")
        assert error["error"]["code"] == "server_shutting_down"
        error = await socket.error(input="x")
        assert error["status"] == 503
        go.set()
        assert text((await socket.until("response.completed"))[-1]["response"]) == "ab"
        assert await socket.closed() == aiohttp.WSCloseCode.GOING_AWAY
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await client.session.ws_connect(client.url + PATH)
        assert refused.value.status == 503

    talk(use, script)


def test_who_may_not_call_may_not_connect() -> None:
    async def use(client: Client) -> None:
        async def refused(**headers: str) -> int:
            with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
                await client.session.ws_connect(client.url + PATH, headers=headers)
            return caught.value.status

        assert await refused() == 401
        key = {"Authorization": "Bearer right"}
        assert await refused(**key, Origin="https://evil.example") == 403
        async with connected(client, headers=key) as socket:
            assert text(await socket.answer(input="x")) == "Hello world"

    run(use, config=ServerConfig(api_key=["right"]))


def test_a_plain_get_is_told_what_the_route_is_for() -> None:
    async def use(client: Client) -> None:
        status, body, response = await client.get(PATH)
        assert status == 426 and "Upgrade" in body["error"]["message"]
        assert response.headers["Upgrade"] == "websocket"

    run(use)


def test_a_message_above_the_limit_closes_the_connection() -> None:
    async def use(client: Client, socket: Socket) -> None:
        await socket.create(input="x" * 5000)
        assert await socket.closed() == aiohttp.WSCloseCode.MESSAGE_TOO_BIG

    talk(use, config=ServerConfig(max_body_bytes=4096))


@pytest.mark.slow
def test_messages_that_never_come_whole_are_held_against_the_bodies() -> None:
    async def use(client: Client) -> None:
        bodies = client.app[CONTEXT].bodies
        begin = struct.pack(">BBQ4s", 0x81, 0x80 | 127, 4 * 1024 * 1024, b"mask")
        async with connected(client) as first, connected(client) as second:
            for socket in (first, second):
                transport = socket.raw.get_extra_info("socket")
                assert transport is not None
                socket.raw._writer.transport.write(begin + bytes(300_000))  # type: ignore[union-attr]
                while bodies.used < 300_000:
                    await asyncio.sleep(0.01)
                bodies._limit = 500_000
            assert (await second.raw.receive()).type in (
                aiohttp.WSMsgType.CLOSED,
                aiohttp.WSMsgType.CLOSE,
                aiohttp.WSMsgType.ERROR,
            )
            assert not first.raw.closed and bodies.used <= 500_000
        while client.app[RESPONSES].sessions:
            await asyncio.sleep(0.01)
        assert bodies.used == 0

    run(use)


def test_a_reader_that_reads_nothing_is_cut_off() -> None:
    async def flood(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        while True:
            sink.on_row(0, "x" * 65536, 1)
            await asyncio.sleep(0)

    async def use(client: Client, socket: Socket) -> None:
        await socket.create(input="x")
        transport = socket.raw.get_extra_info("socket")
        assert transport is not None
        await client.gateway.cancel_seen.wait()  # the client's buffer is bounded as well

    talk(use, flood)


def test_the_log_has_a_line_for_each_response(capfd: pytest.CaptureFixture[str]) -> None:
    async def use(client: Client) -> None:
        async with connected(client, headers={"x-request-id": "sock"}) as socket:
            await socket.answer(input="x")
            await socket.error(input="x", previous_response_id="resp_x")

    logs.set_up("frontend", "info", "json")
    capfd.readouterr()
    run(use, say("a"))
    logs.flush()
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    shown = [(one["id"], one["status"], one["route"], one.get("error")) for one in lines]
    assert shown == [
        ("sock-1", 200, PATH, None),
        ("sock-2", 400, PATH, "previous_response_not_found"),
    ]
