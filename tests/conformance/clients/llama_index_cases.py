"""LlamaIndex's ``OpenAILike`` and its agent."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from asked import ANNA, DOCUMENTS, MAX_TOKENS, OSLO, SUM, TOO_LONG, Person, Weather
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ThinkingBlock
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike


@pytest.fixture
def settings(base_url: str, api_key: str, model: str) -> dict[str, Any]:
    return {
        "api_base": f"{base_url}/v1",
        "api_key": api_key,
        "model": model,
        "is_chat_model": True,
        "is_function_calling_model": True,
        "context_window": 2048,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "max_retries": 3,
        "timeout": 120,
    }


@pytest.fixture
def llm(settings: dict[str, Any]) -> OpenAILike:
    return OpenAILike(**settings)


def set_timer(minutes: int) -> str:
    """Start a timer."""
    return f"{minutes} minutes"


def tools(weather: Weather) -> list[FunctionTool]:
    """With the plain descriptions that other clients give."""
    plain = {"name": "get_weather", "description": "Get the current weather of a city."}
    return [
        FunctionTool.from_defaults(weather.get_weather, **plain),
        FunctionTool.from_defaults(set_timer, name="set_timer", description="Start a timer."),
    ]


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def test_a_chat_is_answered_alike_whole_and_streamed(llm: OpenAILike, demo: bool) -> None:
    whole = llm.chat([user(SUM)]).message
    *_, last = llm.stream_chat([user(SUM)])
    assert whole.content == last.message.content != ""
    if demo:
        assert whole.content == "42"
        (thinking,) = [one for one in last.message.blocks if isinstance(one, ThinkingBlock)]
        assert "17" in thinking.content


@pytest.mark.parametrize("choice", ["required", "get_weather", "set_timer"])
def test_calls_are_forced(llm: OpenAILike, choice: str) -> None:
    asked: dict[str, Any] = {"tools": tools(Weather()), "user_msg": OSLO, "tool_choice": choice}
    whole = llm.get_tool_calls_from_response(llm.chat_with_tools(**asked))
    *_, last = llm.stream_chat_with_tools(**asked)
    pieces = llm.get_tool_calls_from_response(last)
    made = [(call.tool_name, call.tool_kwargs) for call in whole]
    assert made == [(call.tool_name, call.tool_kwargs) for call in pieces] != []
    assert {name for name, _ in made} == {choice} or choice == "required"


def test_a_loop_of_three_calls_keeps_its_history(llm: OpenAILike, demo: bool) -> None:
    weather = Weather()
    offered, history = tools(weather)[:1], [user(OSLO)]
    for _ in range(3):
        answer = llm.chat_with_tools(
            offered,
            chat_history=history,
            tool_choice="auto" if demo else "required",
            allow_parallel_tool_calls=False,
        )
        (call,) = llm.get_tool_calls_from_response(answer)
        result = weather.get_weather(**call.tool_kwargs)
        answers = {"tool_call_id": call.tool_id}
        told = ChatMessage(role="tool", content=result, additional_kwargs=answers)
        history += [answer.message, told]
    assert llm.chat(history).message.content
    assert weather.called_three_times() or not demo


@pytest.mark.calls
def test_an_agent_makes_three_calls_and_answers(llm: OpenAILike) -> None:
    weather = Weather()

    async def main() -> str:
        return str(await FunctionAgent(tools=tools(weather)[:1], llm=llm).run(OSLO))

    assert asyncio.run(main())
    assert weather.called_three_times()


@pytest.mark.parametrize("by_schema", [False, True], ids=["call", "schema"])
def test_an_answer_is_typed(settings: dict[str, Any], demo: bool, by_schema: bool) -> None:
    llm = OpenAILike(**settings, should_use_structured_outputs=by_schema)
    prompt = PromptTemplate("{asked}")
    answer = llm.structured_predict(Person, prompt, asked=ANNA)
    assert isinstance(answer, Person)
    assert answer.age == 36 or not demo
    if by_schema:  # of a stream LlamaIndex forces no call
        *_, last = llm.stream_structured_predict(Person, prompt, asked=ANNA)
        assert last.model_dump() == answer.model_dump()


def test_errors_are_those_of_openai_s_sdk(settings: dict[str, Any], llm: OpenAILike) -> None:
    with pytest.raises(openai.NotFoundError, match="none-such"):
        OpenAILike(**{**settings, "model": "none-such"}).chat([user(SUM)])
    with pytest.raises(openai.AuthenticationError):
        OpenAILike(**{**settings, "api_key": "wrong"}).chat([user(SUM)])
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        llm.chat([user(SUM)], logprobs=True, top_logprobs=1000)
    with pytest.raises(openai.BadRequestError, match="prompt is too long"):
        list(llm.stream_chat([user(TOO_LONG)]))


def test_texts_become_vectors(settings: dict[str, Any], encoder: str) -> None:
    address = {name: settings[name] for name in ("api_base", "api_key", "max_retries")}
    made = OpenAILikeEmbedding(model_name=encoder, embed_batch_size=2, **address)
    vectors = made.get_text_embedding_batch(DOCUMENTS)
    assert [len(vector) for vector in vectors] == [32] * 3
    assert made.get_query_embedding(DOCUMENTS[1]) == pytest.approx(vectors[1], abs=1e-6)
