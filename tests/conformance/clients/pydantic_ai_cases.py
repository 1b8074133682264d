"""Pydantic AI's agents, over chat completions and over the Responses API."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asked import ANNA, MAX_TOKENS, OSLO, SUM, TOO_LONG, Person, Weather
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ThinkingPart, ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

Settings = dict[str, Any]


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel])
def chat(request: pytest.FixtureRequest, base_url: str, api_key: str, model: str) -> Any:
    return request.param(model, provider=OpenAIProvider(base_url=f"{base_url}/v1", api_key=api_key))


@pytest.fixture
def settings() -> Settings:
    return {"temperature": 0, "max_tokens": MAX_TOKENS}


def streamed(agent: Agent[None, Any], asked: str) -> tuple[Any, list[Any]]:
    """The output of a streamed run and its messages."""

    async def main() -> tuple[Any, list[Any]]:
        async with agent.run_stream(asked) as result:
            return await result.get_output(), result.all_messages()

    return asyncio.run(main())


def parts(messages: list[Any], kind: type) -> list[Any]:
    return [part for message in messages for part in message.parts if isinstance(part, kind)]


def thought(part: ThinkingPart) -> str:
    """Of a response it is kept as it was sent, since summaries are what is shown."""
    return part.content or "".join((part.provider_details or {})["raw_content"])


def test_a_chat_is_answered_alike_whole_and_streamed(
    chat: Any, settings: Settings, demo: bool
) -> None:
    agent = Agent(chat, model_settings=settings)
    whole = agent.run_sync(SUM)
    output, messages = streamed(agent, SUM)
    assert whole.output == output != ""
    if demo:
        (first,) = parts(whole.all_messages(), ThinkingPart)
        (again,) = parts(messages, ThinkingPart)
        assert output == "42" and "17" in thought(first) == thought(again)


@pytest.mark.calls
def test_an_agent_makes_three_calls_and_answers(chat: Any, settings: Settings) -> None:
    for run in (lambda agent: agent.run_sync(OSLO).all_messages(), lambda a: streamed(a, OSLO)[1]):
        weather = Weather()
        agent = Agent(chat, tools=[weather.get_weather], model_settings=settings)
        messages = run(agent)
        assert weather.called_three_times()
        assert len(parts(messages, ToolCallPart)) == 3


@pytest.mark.parametrize("form", [Person, NativeOutput(Person)])
def test_an_answer_is_typed(chat: Any, settings: Settings, demo: bool, form: Any) -> None:
    """By a tool that must be called, and by a JSON schema."""
    agent = Agent(chat, output_type=form, model_settings=settings)
    answer = agent.run_sync(ANNA).output
    assert isinstance(answer, Person)
    assert streamed(agent, ANNA)[0] == answer
    assert answer.age == 36 or not demo


def test_errors_have_the_status_and_the_body(
    chat: Any, base_url: str, api_key: str, model: str, settings: Settings
) -> None:
    for name, key, status in (("none-such", api_key, 404), (model, "wrong", 401)):
        provider = OpenAIProvider(base_url=f"{base_url}/v1", api_key=key)
        with pytest.raises(ModelHTTPError) as caught:
            Agent(type(chat)(name, provider=provider)).run_sync(SUM)
        assert caught.value.status_code == status
    agent = Agent(chat, model_settings={**settings, "temperature": 1e9})
    with pytest.raises(ModelHTTPError, match="temperature") as caught:
        agent.run_sync(SUM)
    assert caught.value.status_code == 400
    with pytest.raises(ModelHTTPError) as caught:
        streamed(Agent(chat, model_settings=settings), TOO_LONG)
    assert caught.value.body["code"] == "context_length_exceeded"
