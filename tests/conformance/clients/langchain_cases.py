"""LangChain's ``ChatOpenAI``, over chat completions and over the Responses API."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from asked import ANNA, DOCUMENTS, MAX_TOKENS, OSLO, SUM, TOO_LONG, Person, Weather
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings


@pytest.fixture
def settings(base_url: str, api_key: str, model: str) -> dict[str, Any]:
    return {
        "base_url": f"{base_url}/v1",
        "api_key": api_key,
        "model": model,
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "max_retries": 3,
        "stream_usage": True,  # else only asked for where the address is OpenAI's
    }


@pytest.fixture
def chat(settings: dict[str, Any]) -> ChatOpenAI:
    return ChatOpenAI(**settings)


@tool
def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    return f"rain in {city}"


@tool
def set_timer(minutes: int) -> str:
    """Start a timer."""
    return f"{minutes} minutes"


def streamed(runnable: Any, asked: Any) -> Any:
    """The message that LangChain adds up from a stream."""
    first, *more = runnable.stream(asked)
    for chunk in more:
        first += chunk
    return first


def called(message: Any) -> list[tuple[str, Any]]:
    return [(call["name"], call["args"]) for call in message.tool_calls]


def test_a_chat_is_answered_alike_whole_and_streamed(chat: ChatOpenAI, demo: bool) -> None:
    whole = chat.invoke(SUM)
    pieces = streamed(chat, SUM)
    assert whole.content == pieces.content != ""
    assert pieces.usage_metadata == whole.usage_metadata
    if demo:
        assert whole.content == "42"
        assert whole.usage_metadata["output_token_details"]["reasoning"] > 0


def test_responses_show_the_reasoning(settings: dict[str, Any], demo: bool) -> None:
    chat = ChatOpenAI(**settings, use_responses_api=True)
    whole, pieces = chat.invoke(SUM), streamed(chat, SUM)
    assert whole.text == pieces.text != ""
    kinds = [block["type"] for block in whole.content_blocks]
    assert kinds == (["reasoning", "text"] if demo else ["text"])


@pytest.mark.calls
def test_a_tool_is_called_of_the_model_s_own_accord(chat: ChatOpenAI) -> None:
    offered = chat.bind_tools([get_weather, set_timer])
    assert called(offered.invoke(OSLO)) == [("get_weather", {"city": "Oslo"})]
    assert called(streamed(offered, OSLO)) == [("get_weather", {"city": "Oslo"})]


@pytest.mark.parametrize("choice", ["any", "get_weather", "set_timer"])
def test_calls_are_forced(chat: ChatOpenAI, choice: str) -> None:
    offered = chat.bind_tools([get_weather, set_timer], tool_choice=choice)
    whole, pieces = offered.invoke(OSLO), streamed(offered, OSLO)
    assert called(whole) == called(pieces) != []
    names = {name for name, _ in called(whole)}
    assert names == {choice} or choice == "any"


def test_a_loop_of_three_calls_keeps_its_history(chat: ChatOpenAI, demo: bool) -> None:
    weather = Weather()
    offered = chat.bind_tools(
        [get_weather], tool_choice="auto" if demo else "any", parallel_tool_calls=False
    )
    messages: list[Any] = [HumanMessage(OSLO)]
    for _ in range(3):
        messages.append(streamed(offered, messages))
        (call,) = messages[-1].tool_calls
        messages.append(ToolMessage(weather.get_weather(**call["args"]), tool_call_id=call["id"]))
    assert chat.invoke(messages).content
    assert weather.called_three_times() or not demo


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_is_typed(chat: ChatOpenAI, demo: bool, method: Any) -> None:
    typed = chat.with_structured_output(Person, method=method)
    answer = typed.invoke(ANNA)
    *_, last = typed.stream(ANNA)
    assert isinstance(answer, Person) and last == answer
    assert answer == Person(name="Anna", age=36) or not demo


def test_errors_are_langchain_s(settings: dict[str, Any], chat: ChatOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="none-such"):
        ChatOpenAI(**{**settings, "model": "none-such"}).invoke(SUM)
    with pytest.raises(openai.AuthenticationError):
        ChatOpenAI(**{**settings, "api_key": "wrong"}).invoke(SUM)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        ChatOpenAI(**{**settings, "temperature": 1e9}).invoke(SUM)
    with pytest.raises(ContextOverflowError):
        chat.invoke(TOO_LONG)
    with pytest.raises(ContextOverflowError):
        list(chat.stream(TOO_LONG))


def test_texts_become_vectors(settings: dict[str, Any], encoder: str) -> None:
    address = {name: settings[name] for name in ("base_url", "api_key", "max_retries")}
    # Else it counts and cuts by the tokenizer of OpenAI's models.
    made = OpenAIEmbeddings(model=encoder, check_embedding_ctx_length=False, **address)
    vectors = made.embed_documents(DOCUMENTS)
    assert [len(vector) for vector in vectors] == [32] * 3
    assert made.embed_query(DOCUMENTS[1]) == pytest.approx(vectors[1], abs=1e-6)
    with pytest.raises(openai.BadRequestError):
        made.embed_query(TOO_LONG)
