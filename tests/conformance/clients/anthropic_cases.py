"""The Anthropic SDK for Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import beta_tool
from asked import ANNA, MAX_TOKENS, OSLO, SUM, TIMER, TOO_LONG, WEATHER, Person, Weather


def tool(function: dict[str, Any]) -> dict[str, Any]:
    """As Anthropic's API has it."""
    described = function["function"]
    schema = {"input_schema": described["parameters"]}
    return {"name": described["name"], "description": described["description"], **schema}


@pytest.fixture(scope="module")
def api(base_url: str, api_key: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=base_url, api_key=api_key, max_retries=3) as client:
        yield client


@pytest.fixture
def asked(model: str) -> dict[str, Any]:
    return {"model": model, "max_tokens": MAX_TOKENS, "extra_body": {"temperature": 0}}


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def streamed(api: anthropic.Anthropic, **asked: Any) -> Any:
    """The message that the SDK puts together from a stream."""
    with api.messages.stream(**asked) as events:
        for _ in events:
            pass
        return events.get_final_message()


def called(message: Any) -> list[tuple[str, Any]]:
    return [(block.name, block.input) for block in message.content if block.type == "tool_use"]


def test_a_chat_is_answered_alike_whole_and_streamed(
    api: anthropic.Anthropic, asked: dict[str, Any], demo: bool
) -> None:
    whole = api.messages.create(messages=user(SUM), **asked)
    pieces = streamed(api, messages=user(SUM), **asked)
    assert [block.text for block in whole.content] == [block.text for block in pieces.content]
    assert whole.content[0].text
    assert pieces.usage.output_tokens == whole.usage.output_tokens
    if demo:
        thought = streamed(api, messages=user(SUM), thinking={"type": "adaptive"}, **asked)
        assert "17" in thought.content[0].thinking and thought.content[1].text == "42"


def test_calls_are_forced_by_any_and_by_name(
    api: anthropic.Anthropic, asked: dict[str, Any]
) -> None:
    tools = [tool(WEATHER), tool(TIMER)]
    for choice, names in (
        ({"type": "any"}, {"get_weather", "set_timer"}),
        ({"type": "tool", "name": "set_timer", "disable_parallel_tool_use": True}, {"set_timer"}),
    ):
        settings = {**asked, "messages": user(OSLO), "tools": tools, "tool_choice": choice}
        whole, pieces = api.messages.create(**settings), streamed(api, **settings)
        assert whole.stop_reason == pieces.stop_reason == "tool_use"
        assert called(whole) == called(pieces) != []
        assert {name for name, _ in called(whole)} <= names
    assert len(called(whole)) == 1
    none = api.messages.create(**{**settings, "tool_choice": {"type": "none"}})
    assert called(none) == []


def test_a_loop_of_three_calls_keeps_its_history(
    api: anthropic.Anthropic, asked: dict[str, Any], demo: bool
) -> None:
    weather, messages = Weather(), user(OSLO)
    choice = {"type": "auto" if demo else "any", "disable_parallel_tool_use": True}
    tools = [tool(WEATHER)]
    for _ in range(3):
        answer = streamed(api, messages=messages, tools=tools, tool_choice=choice, **asked)
        (call,) = [block for block in answer.content if block.type == "tool_use"]
        told = weather.get_weather(**call.input)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": told}
        messages += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]
    last = api.messages.create(messages=messages, tools=tools, **asked)
    assert last.content[0].text
    assert weather.called_three_times() or not demo


@pytest.mark.calls
@pytest.mark.parametrize("stream", [False, True])
def test_the_sdk_s_tool_runner_makes_three_calls_and_answers(
    api: anthropic.Anthropic, asked: dict[str, Any], stream: bool
) -> None:
    weather = Weather()
    runner = api.beta.messages.tool_runner(
        messages=user(OSLO), tools=[beta_tool(weather.get_weather)], stream=stream, **asked
    )
    last = runner.until_done()
    assert last.content[0].type == "text" and last.content[0].text
    assert weather.called_three_times()


def test_an_answer_is_typed(api: anthropic.Anthropic, asked: dict[str, Any], demo: bool) -> None:
    answer = api.messages.parse(messages=user(ANNA), output_format=Person, **asked).parsed_output
    assert isinstance(answer, Person)
    assert streamed(api, messages=user(ANNA), output_format=Person, **asked).parsed_output == answer
    assert answer.age == 36 or not demo


def test_errors_are_those_of_the_sdk(
    api: anthropic.Anthropic, asked: dict[str, Any], base_url: str
) -> None:
    with pytest.raises(anthropic.NotFoundError, match="none-such"):
        api.messages.create(**{**asked, "model": "none-such"}, messages=user(SUM))
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        api.messages.create(**{**asked, "extra_body": {"temperature": 1e9}}, messages=user(SUM))
    for ask in (api.messages.create, lambda **given: streamed(api, **given)):
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            ask(messages=user(TOO_LONG), **asked)
    with (
        anthropic.Anthropic(base_url=base_url, api_key="wrong", max_retries=3) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.models.list()
