"""The Responses API over a WebSocket: lanes, what a connection remembers, steering."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.frontend.frontend_scripted import STOP, Client, rejected, run
from support.frontend.responses_client import (
    PATH,
    Socket,
    connected,
    messages,
    talk,
    text,
    until_cancelled,
)

from penstock.client.sink import RowExtras, Sink
from penstock.protocol.wire.messages.requests import Work
from penstock.protocol.wire.messages.tokens import ToolArguments, ToolCallOpened
from penstock.services.frontend.context import CONTEXT
from penstock.services.frontend.dialects.responses.state import RESPONSES
from penstock.services.frontend.dialects.responses.steering import MAX_STEER_BYTES, OVERHEAD_BYTES


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
        while client.app[CONTEXT].sockets:
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


def test_steering_that_waits_is_bounded_in_bytes_over_all_responses_of_a_connection() -> None:
    """A client may steer one response after the other and never bring the results of tools."""

    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        name = f"call-{len(works)}"
        works.append(work)
        sink.on_row(0, "", 1, RowExtras(events=[ToolCallOpened(0, name, "weather")]))
        await going[0].wait()
        sink.on_row(0, "", 1, RowExtras(events=[ToolArguments(0, "{}")], end=STOP))

    works: list[Work] = []
    going = [asyncio.Event()]

    async def use(client: Client, socket: Socket) -> None:
        async def begun(lane: str) -> str:
            tools = [{"type": "function", "name": "weather"}]
            await socket.create(input="weather?", tools=tools, stream_id=lane)
            found: str = (await socket.until("response.output_item.added"))[0]["response"]["id"]
            return found

        large = "x" * (MAX_STEER_BYTES // 3)
        first = await begun("one")
        await socket.steer(first, large)
        await socket.until("response.steer.accepted")
        going[0].set()
        await socket.until("response.steer.pending")
        going[0] = asyncio.Event()
        second = await begun("two")
        await socket.steer(second, large)
        await socket.until("response.steer.accepted")
        await socket.steer(second, large)
        (failed,) = await socket.until("response.steer.failed")
        error = failed["error"]
        assert (error["code"], failed["stream_id"]) == ("pending_steers_too_large", "two")
        assert str(MAX_STEER_BYTES - OVERHEAD_BYTES) in error["message"]
        assert failed["steer"]["input"] == large
        await socket.steer(second, "short")
        await socket.until("response.steer.accepted")
        going[0].set()
        await socket.until("response.steer.pending")
        going[0] = asyncio.Event()
        output = {"type": "function_call_output", "call_id": "call-0", "output": "20 degrees"}
        third_from = {"input": [output], "previous_response_id": first, "stream_id": "three"}
        await socket.create(**third_from)
        third = (await socket.until("response.created"))[-1]["response"]["id"]
        await socket.steer(third, large)
        await socket.until("response.steer.accepted")

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
