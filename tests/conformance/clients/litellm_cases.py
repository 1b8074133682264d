"""LiteLLM, over OpenAI's chat completions and over Anthropic's messages."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else a list of prices is fetched at import

import litellm
import pytest
from asked import ANNA, MAX_TOKENS, OSLO, SUM, TIMER, TOO_LONG, WEATHER, Person, Weather


@pytest.fixture
def settings(base_url: str, api_key: str, model: str) -> dict[str, Any]:
    return {
        "model": f"openai/{model}",
        "api_base": f"{base_url}/v1",
        "api_key": api_key,
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "num_retries": 3,
        "max_retries": 3,
    }


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def whole(**asked: Any) -> Any:
    return litellm.completion(**asked).choices[0].message


def streamed(**asked: Any) -> Any:
    """The message that LiteLLM puts together from a stream."""
    chunks = list(litellm.completion(**asked, stream=True))
    return litellm.stream_chunk_builder(chunks, messages=asked["messages"]).choices[0].message


def called(message: Any) -> list[tuple[str, Any]]:
    found = message.tool_calls or ()
    return [(one.function.name, json.loads(one.function.arguments)) for one in found]


def test_a_chat_is_answered_alike_whole_and_streamed(settings: dict[str, Any], demo: bool) -> None:
    answer = whole(messages=user(SUM), **settings)
    pieces = streamed(messages=user(SUM), **settings)
    assert answer.content == pieces.content != ""
    if demo:
        assert answer.content == "42" and "17" in answer.reasoning_content
        assert pieces.reasoning_content == answer.reasoning_content


@pytest.mark.parametrize("choice", ["required", "get_weather", "set_timer"])
def test_calls_are_forced(settings: dict[str, Any], choice: str) -> None:
    named = {"type": "function", "function": {"name": choice}}
    settings["tool_choice"] = choice if choice == "required" else named
    asked = {**settings, "messages": user(OSLO), "tools": [WEATHER, TIMER]}
    calls = called(whole(**asked))
    assert calls == called(streamed(**asked)) != []
    assert {name for name, _ in calls} == {choice} or choice == "required"


def test_a_loop_of_three_calls_keeps_its_history(settings: dict[str, Any], demo: bool) -> None:
    weather, messages = Weather(), user(OSLO)
    for _ in range(3):
        message = streamed(
            messages=messages,
            tools=[WEATHER],
            tool_choice="auto" if demo else "required",
            parallel_tool_calls=False,
            **settings,
        )
        (call,) = message.tool_calls
        result = weather.get_weather(**json.loads(call.function.arguments))
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    assert whole(messages=messages, tools=[WEATHER], **settings).content
    assert weather.called_three_times() or not demo


def test_an_answer_is_typed(settings: dict[str, Any], demo: bool) -> None:
    asked = {**settings, "messages": user(ANNA), "response_format": Person}
    answer = Person.model_validate_json(whole(**asked).content)
    assert Person.model_validate_json(streamed(**asked).content) == answer
    assert answer == Person(name="Anna", age=36) or not demo


def test_anthropic_s_api_is_spoken_too(settings: dict[str, Any], base_url: str, model: str) -> None:
    settings |= {"model": f"anthropic/{model}", "api_base": base_url}
    assert whole(messages=user(SUM), **settings).content
    asked = {**settings, "messages": user(OSLO), "tools": [WEATHER], "tool_choice": "required"}
    calls = called(whole(**asked))
    assert calls == called(streamed(**asked))
    assert calls[0] == ("get_weather", {"city": "Oslo"})


@pytest.mark.parametrize("ask", [whole, streamed])
def test_errors_are_litellm_s(settings: dict[str, Any], ask: Any) -> None:
    with pytest.raises(litellm.NotFoundError, match="none-such"):
        ask(messages=user(SUM), **{**settings, "model": "openai/none-such"})
    with pytest.raises(litellm.AuthenticationError):
        ask(messages=user(SUM), **{**settings, "api_key": "wrong"})
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        ask(messages=user(SUM), **{**settings, "temperature": 1e9})
    with pytest.raises(litellm.ContextWindowExceededError):
        ask(messages=user(TOO_LONG), **settings)
