"""The built-in model calls tools and thinks, seen through the OpenAI SDK."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from served import Served, served

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
TIMER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "set_timer",
        "description": "Set a timer",
        "parameters": {
            "type": "object",
            "properties": {"minutes": {"type": "integer"}},
            "required": ["minutes"],
        },
    },
}
ASKED = [{"role": "user", "content": "What is the weather in Oslo?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    # Texts of two requests are the same bit for bit only in float32.
    with served("--device", "cpu", "--dtype", "float32") as server:
        yield server


@pytest.fixture
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def create(client: openai.OpenAI, messages: list[Any], **settings: Any) -> Any:
    return client.chat.completions.create(
        model="penstock-demo", messages=messages, temperature=0, **settings
    )


def streamed(client: openai.OpenAI, messages: list[Any], **settings: Any) -> Any:
    """The final completion that the SDK puts together from a stream."""
    with client.chat.completions.stream(
        model="penstock-demo", messages=messages, temperature=0, **settings
    ) as events:
        for _ in events:
            pass
        return events.get_final_completion()


def without_ids(message: Any) -> tuple[Any, ...]:
    calls = [(one.function.name, one.function.arguments) for one in message.tool_calls or ()]
    return message.content, getattr(message, "reasoning_content", None), calls


def test_a_tool_is_called_and_its_result_is_told(client: openai.OpenAI) -> None:
    answer = create(client, ASKED, tools=[WEATHER, TIMER]).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    told = create(client, [*ASKED, answer.message, result], tools=[WEATHER, TIMER]).choices[0]
    assert told.finish_reason == "stop"
    assert "rain" in told.message.content


def test_a_stream_gives_the_same_calls(client: openai.OpenAI) -> None:
    whole = create(client, ASKED, tools=[WEATHER]).choices[0]
    pieces = streamed(client, ASKED, tools=[WEATHER]).choices[0]
    assert without_ids(pieces.message) == without_ids(whole.message)
    assert pieces.finish_reason == "tool_calls"


def test_the_deltas_of_a_call_have_its_id_and_name_once_and_first(client: openai.OpenAI) -> None:
    chunks = list(create(client, ASKED, tools=[WEATHER], stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    first, *later = [call for delta in deltas for call in delta.tool_calls or ()]
    assert (first.index, first.type, first.function.name) == (0, "function", "get_weather")
    assert first.id.startswith("call_")
    assert first.function.arguments == ""
    assert all((one.index, one.id, one.function.name) == (0, None, None) for one in later)
    assert json.loads("".join(one.function.arguments for one in later)) == {"city": "Oslo"}
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert [one for one in reasons if one] == ["tool_calls"]


def test_thinking_stands_beside_the_answer(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "What is 17 + 25?"}]
    answer = create(client, question)
    message = answer.choices[0].message
    assert message.content == "42"
    assert "17" in message.reasoning
    assert message.reasoning == message.reasoning_content
    details = answer.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens < answer.usage.completion_tokens
    again = streamed(client, question, stream_options={"include_usage": True})
    assert without_ids(again.choices[0].message) == without_ids(message)
    assert again.usage.completion_tokens_details == details
    hidden = create(client, question, extra_body={"include_reasoning": False}).choices[0].message
    assert (hidden.content, getattr(hidden, "reasoning", None)) == ("42", None)
    off = create(client, question, reasoning_effort="none").choices[0].message
    assert getattr(off, "reasoning", None) is None


def test_a_stop_string_ends_the_answer_and_not_the_thinking(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "What is 17 + 25?"}]
    answer = create(client, question, stop=["2"]).choices[0]
    assert (answer.message.content, answer.finish_reason) == ("4", "stop")
    assert "2" in answer.message.reasoning


def test_without_tools_a_call_is_text(client: openai.OpenAI) -> None:
    offered = create(client, ASKED, tools=[WEATHER], tool_choice="none").choices[0]
    assert offered.message.tool_calls is None
    assert offered.finish_reason == "stop"
