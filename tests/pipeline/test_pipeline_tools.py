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


def test_a_call_is_forced_where_it_is_a_must(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "Tell me about water."}]
    tools = [WEATHER, TIMER]
    answer = create(client, question, tools=tools, tool_choice="required").choices[0]
    assert answer.finish_reason == "tool_calls"
    for call in answer.message.tool_calls:
        assert call.function.name in {"get_weather", "set_timer"}
        json.loads(call.function.arguments)
    named = {"type": "function", "function": {"name": "set_timer"}}
    for parallel in (True, False):
        answer = create(
            client, question, tools=tools, tool_choice=named, parallel_tool_calls=parallel
        ).choices[0]
        assert answer.finish_reason == "tool_calls"
        for call in answer.message.tool_calls:
            assert call.function.name == "set_timer"
            assert isinstance(json.loads(call.function.arguments)["minutes"], int)
        assert parallel or len(answer.message.tool_calls) == 1


def test_allowed_tools_are_the_only_ones_called(client: openai.OpenAI) -> None:
    reference = {"type": "function", "function": {"name": "set_timer"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [reference]}}
    answer = create(client, ASKED, tools=[WEATHER, TIMER], tool_choice=choice).choices[0]
    assert all(one.function.name == "set_timer" for one in answer.message.tool_calls or ())


def test_an_answer_may_be_json_or_a_call(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    called = create(client, ASKED, tools=[WEATHER], response_format=format).choices[0].message
    assert called.tool_calls or json.loads(called.content).keys() == {"a"}
    question = [{"role": "user", "content": "What is 3 + 4?"}]
    plain = create(client, question, tools=[WEATHER], response_format=format).choices[0].message
    assert plain.tool_calls or json.loads(plain.content).keys() == {"a"}


def test_thinking_ends_when_its_budget_is_spent(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "What is 1234 + 2345?"}]
    free = create(client, question)
    assert free.usage.completion_tokens_details.reasoning_tokens > 20
    for budget in (0, 7):
        body = {"thinking_token_budget": budget}
        answer = create(client, question, extra_body=body, max_tokens=60)
        details = answer.usage.completion_tokens_details
        assert (details.reasoning_tokens if details else 0) <= budget + 2
        assert answer.choices[0].message.content


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tools": [WEATHER, WEATHER]}, "two of the name 'get_weather'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "function is missing"),
        ({"tool_choice": "required"}, "there are no tools"),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "function", "function": {"name": "nothing"}},
            },
            "'nothing', which is none of the tools given",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ],
)
def test_what_is_wrong_with_tools_is_told(
    client: openai.OpenAI, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, ASKED, **settings)
    assert words in str(caught.value)
