"""OpenAI's SDK speaks the Responses API with a whole server, over HTTP and WebSocket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import FunctionToolParam, ResponseFunctionToolCall
from pydantic import BaseModel, Field
from support.pipeline.served import Served, served

pytestmark = pytest.mark.slow

TOOL: FunctionToolParam = {
    "type": "function",
    "name": "set_timer",
    "description": "Start a timer.",
    "parameters": {
        "type": "object",
        "properties": {"minutes": {"type": "integer"}},
        "required": ["minutes"],
    },
    "strict": False,
}
"""One that the built-in model has learned to call."""
ENDS = {"response.completed", "response.incomplete", "response.failed", "error"}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as running:
        yield running


@pytest.fixture(scope="module")
def api(server: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(api: OpenAI) -> str:
    return next(iter(api.models.list())).id


def test_a_stream_says_what_the_whole_response_says(api: OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "input": "Say hello.", "temperature": 0}
    whole = api.responses.create(**asked)
    assert whole.status == "completed" and whole.output_text
    with api.responses.stream(**asked) as stream:
        events = list(stream)
        last = stream.get_final_response()
    assert last.output_text == whole.output_text
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(len(numbers)))
    assert last.usage is not None and whole.usage is not None
    assert last.usage.output_tokens == whole.usage.output_tokens > 0


def test_a_conversation_goes_on_and_finds_its_prefix_cached(api: OpenAI, model: str) -> None:
    story = "My name is Ada and I have a red boat. " * 10
    first = api.responses.create(model=model, input=story, temperature=0)
    second = api.responses.create(
        model=model, input="What is my name?", previous_response_id=first.id, temperature=0
    )
    assert second.usage is not None and first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0
    assert api.responses.retrieve(second.id).output_text == second.output_text
    texts = [item.type for item in api.responses.input_items.list(second.id, order="asc")]
    assert texts[0] == texts[-1] == "message" and len(texts) >= 3
    api.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError) as gone:
        api.responses.create(model=model, input="And?", previous_response_id=second.id)
    assert gone.value.code == "previous_response_not_found"


def test_a_tool_is_called_and_its_result_is_used(api: OpenAI, model: str) -> None:
    question = "Set a timer for 12 minutes."
    asked: dict[str, Any] = {
        "model": model,
        "tools": [TOOL],
        "temperature": 0,
    }
    with api.responses.stream(input=question, **asked) as stream:
        deltas = [
            event.delta
            for event in stream
            if event.type == "response.function_call_arguments.delta"
        ]
        response = stream.get_final_response()
    (call,) = [item for item in response.output if item.type == "function_call"]
    assert isinstance(call, ResponseFunctionToolCall) and call.name == "set_timer"
    assert "".join(deltas) == call.arguments and json.loads(call.arguments) == {"minutes": 12}
    done = api.responses.create(
        model=model,
        previous_response_id=response.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": '{"ok": true}'}],
        tools=[TOOL],
        temperature=0,
    )
    assert done.status == "completed" and done.output_text


def test_an_answer_is_parsed_as_a_type(api: OpenAI, model: str) -> None:
    class Person(BaseModel):
        name: str = Field(max_length=20)
        age: int = Field(ge=0, le=200)

    response = api.responses.parse(
        model=model, input="Ada is 36 years old.", text_format=Person, temperature=0
    )
    assert isinstance(response.output_parsed, Person)


def test_errors_are_those_of_the_sdk(api: OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError):
        api.responses.create(model="none", input="x")
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve("resp_none")
    with pytest.raises(openai.BadRequestError) as bad:
        api.responses.create(model=model, input="x", tools=[{"type": "web_search"}])
    assert bad.value.param == "tools"


def test_the_tokens_of_an_input_are_those_of_its_prompt(api: OpenAI, model: str) -> None:
    counted = api.responses.input_tokens.count(model=model, input="How many?", tools=[TOOL])
    response = api.responses.create(
        model=model, input="How many?", tools=[TOOL], max_output_tokens=1
    )
    assert response.usage is not None
    assert response.usage.input_tokens == counted.input_tokens > 0


def test_a_websocket_chains_without_a_store_and_runs_lanes(api: OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "temperature": 0, "store": False}
    whole = api.responses.create(input="Say hello.", **asked)
    with api.responses.connect() as connection:

        def answers(count: int) -> list[Any]:
            found = []
            while len(found) < count:
                event = connection.recv()
                assert event.type != "error", event
                if event.type in ENDS:
                    found.append(event)
            return found

        connection.response.create(input="Say hello.", generate=False, **asked)
        (warm,) = answers(1)
        connection.response.create(input="Say hello.", **asked)
        (first,) = answers(1)
        assert first.response.output_text == whole.output_text
        assert first.response.usage.input_tokens_details.cached_tokens >= 0
        for lane in ("a", "b"):
            connection.response.create(
                input="Say it again.",
                previous_response_id=first.response.id,
                stream_id=lane,
                **asked,
            )
        both = answers(2)
        assert {event.stream_id for event in both} == {"a", "b"}
        assert len({event.response.output_text for event in both}) == 1
        connection.response.create(input="And?", previous_response_id=warm.response.id, **asked)
        assert answers(1)[0].response.status == "completed"
        connection.response.create(input="x", previous_response_id="resp_none", **asked)
        event = connection.recv()
        assert event.type == "error" and event.error.code == "previous_response_not_found"


def test_a_response_is_steered_over_a_websocket(server: Served, model: str) -> None:
    async def main() -> None:
        api = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        async with api, api.responses.connect() as connection:
            asked: Any = {
                "type": "response.create",
                "model": model,
                "input": "Tell a story.",
                "store": False,
                "max_output_tokens": 400,
                "ignore_eos": True,
            }
            await connection.send(asked)
            event = await connection.recv()
            target = event.response.id
            while event.type != "response.output_text.delta":
                event = await connection.recv()
            await connection.response.steer(input="Say hello.", previous_response_id=target)
            kinds = []
            while len(kinds) < 2:
                event = await connection.recv()
                kinds += [event] if event.type in ENDS else []
            assert kinds[0].response.incomplete_details.reason == "steered"
            assert kinds[1].response.previous_response_id == target

    asyncio.run(main())
