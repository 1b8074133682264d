"""The OpenAI SDK for Python: chat completions and responses."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from asked import (
    ANNA,
    DOCUMENTS,
    MAX_TOKENS,
    OSLO,
    SUM,
    TIMER,
    TIMER_PARAMETERS,
    TOO_LONG,
    WEATHER,
    Person,
    Weather,
)


@pytest.fixture(scope="module")
def api(base_url: str, api_key: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key=api_key, max_retries=3) as client:
        yield client


@pytest.fixture
def asked(model: str) -> dict[str, Any]:
    return {"model": model, "temperature": 0, "max_tokens": MAX_TOKENS}


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def streamed(api: openai.OpenAI, **asked: Any) -> Any:
    """The completion that the SDK puts together from a stream."""
    with api.chat.completions.stream(**asked) as events:
        for _ in events:
            pass
        return events.get_final_completion()


def calls(message: Any) -> list[tuple[str, Any]]:
    found = message.tool_calls or ()
    return [(one.function.name, json.loads(one.function.arguments)) for one in found]


def test_a_chat_is_answered_alike_whole_and_streamed(
    api: openai.OpenAI, asked: dict[str, Any], demo: bool
) -> None:
    whole = api.chat.completions.create(messages=user(SUM), **asked)
    pieces = streamed(api, messages=user(SUM), stream_options={"include_usage": True}, **asked)
    message, again = whole.choices[0].message, pieces.choices[0].message
    assert message.content and again.content == message.content
    assert pieces.usage.completion_tokens == whole.usage.completion_tokens
    if demo:
        assert message.content == "42"
        assert "17" in message.reasoning and again.reasoning_content == message.reasoning


def test_calls_are_forced_by_required_and_by_name(
    api: openai.OpenAI, asked: dict[str, Any]
) -> None:
    tools = [WEATHER, TIMER]
    for choice, names in (
        ("required", {"get_weather", "set_timer"}),
        (named("get_weather"), {"get_weather"}),
        (named("set_timer"), {"set_timer"}),
    ):
        settings = {**asked, "messages": user(OSLO), "tools": tools, "tool_choice": choice}
        whole = api.chat.completions.create(**settings).choices[0]
        pieces = streamed(api, **settings).choices[0]
        assert whole.finish_reason == pieces.finish_reason == "tool_calls"
        assert calls(whole.message) == calls(pieces.message)
        assert {name for name, _ in calls(whole.message)} <= names
    one = api.chat.completions.create(parallel_tool_calls=False, **settings)
    assert len(calls(one.choices[0].message)) == 1


def test_a_loop_of_three_calls_keeps_its_history(
    api: openai.OpenAI, asked: dict[str, Any], demo: bool
) -> None:
    weather, messages = Weather(), user(OSLO)
    # A model that calls only where it must is made to, three times.
    choice: Any = "auto" if demo else "required"
    for _ in range(3):
        answer = streamed(
            api,
            messages=messages,
            tools=[WEATHER],
            tool_choice=choice,
            parallel_tool_calls=False,
            **asked,
        )
        message = answer.choices[0].message
        (call,) = message.tool_calls
        result = weather.get_weather(**json.loads(call.function.arguments))
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    last = api.chat.completions.create(messages=messages, tools=[WEATHER], **asked).choices[0]
    assert last.finish_reason in {"stop", "length"} and last.message.content
    assert weather.called_three_times() if demo else len(weather.cities) == 3


def test_several_calls_of_one_answer_are_answered_together(
    api: openai.OpenAI, asked: dict[str, Any]
) -> None:
    made = [
        {"id": f"call_{city}", "type": "function",
         "function": {"name": "get_weather", "arguments": json.dumps({"city": city})}}
        for city in ("Oslo", "Rome")
    ]  # fmt: skip
    results = [{"role": "tool", "tool_call_id": one["id"], "content": "rain"} for one in made]
    history = [*user(OSLO), {"role": "assistant", "content": None, "tool_calls": made}, *results]
    answer = api.chat.completions.create(messages=history, tools=[WEATHER], **asked)
    assert answer.choices[0].message.content


def test_an_answer_is_parsed_as_a_type(
    api: openai.OpenAI, asked: dict[str, Any], demo: bool
) -> None:
    settings = {**asked, "messages": user(ANNA), "response_format": Person}
    whole = api.chat.completions.parse(**settings).choices[0].message.parsed
    assert isinstance(whole, Person)
    assert streamed(api, **settings).choices[0].message.parsed == whole
    if demo:
        assert whole == Person(name="Anna", age=36)


def test_a_response_is_whole_streamed_and_typed(api: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "temperature": 0, "max_output_tokens": MAX_TOKENS}
    whole = api.responses.create(input=SUM, **asked)
    with api.responses.stream(input=SUM, **asked) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
    assert text == whole.output_text != ""
    parsed = api.responses.parse(input=ANNA, text_format=Person, **asked)
    assert isinstance(parsed.output_parsed, Person)


def test_a_response_is_continued_with_the_results_of_three_calls(
    api: openai.OpenAI, model: str
) -> None:
    tool = {"type": "function", "name": "set_timer", "parameters": TIMER_PARAMETERS, "strict": True}
    asked: dict[str, Any] = {"model": model, "temperature": 0, "max_output_tokens": MAX_TOKENS}
    given: dict[str, Any] = {"input": "Set a timer for 12 minutes."}
    for _ in range(3):
        answer = api.responses.create(
            tools=[tool], tool_choice="required", parallel_tool_calls=False, **given, **asked
        )
        (call,) = [item for item in answer.output if item.type == "function_call"]
        assert 1 <= json.loads(call.arguments)["minutes"] <= 99
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
        given = {"previous_response_id": answer.id, "input": [result]}
    last = api.responses.create(tools=[tool], tool_choice="none", **given, **asked)
    assert last.output_text


def test_errors_are_those_of_the_sdk(
    api: openai.OpenAI, asked: dict[str, Any], base_url: str
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError, match="none-such"):
            api.chat.completions.create(
                **{**asked, "model": "none-such"}, messages=user(SUM), stream=stream
            )
        with pytest.raises(openai.BadRequestError, match="temperature"):
            api.chat.completions.create(
                **{**asked, "temperature": 1e9}, messages=user(SUM), stream=stream
            )
        with pytest.raises(openai.BadRequestError, match="max-model-len") as caught:
            api.chat.completions.create(**asked, messages=user(TOO_LONG), stream=stream)
        assert caught.value.code == "context_length_exceeded"
    with (
        openai.OpenAI(base_url=f"{base_url}/v1", api_key="wrong", max_retries=3) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_texts_become_vectors_as_base64_and_as_numbers(api: openai.OpenAI, encoder: str) -> None:
    packed = api.embeddings.create(model=encoder, input=DOCUMENTS)  # which the SDK asks for itself
    plain = api.embeddings.create(model=encoder, input=DOCUMENTS, encoding_format="float")
    assert [one.index for one in packed.data] == [0, 1, 2]
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert math.hypot(*one.embedding) == pytest.approx(1, abs=1e-5)
    assert packed.data[0].embedding != packed.data[1].embedding
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > 30
    (alone,) = api.embeddings.create(model=encoder, input=DOCUMENTS[1]).data
    assert alone.embedding == pytest.approx(packed.data[1].embedding, abs=1e-6)
    ids = api.embeddings.create(model=encoder, input=[[2, 4, 5, 3], [2, 6, 3]])
    assert ids.usage.prompt_tokens == 7


def test_what_makes_no_vector_is_refused_as_the_sdk_knows_it(
    api: openai.OpenAI, encoder: str, model: str
) -> None:
    with pytest.raises(openai.NotFoundError):
        api.embeddings.create(model="none", input="x")
    with pytest.raises(openai.BadRequestError, match="generate"):
        api.embeddings.create(model=model, input="x")
    with pytest.raises(openai.BadRequestError, match="too long"):
        api.embeddings.create(model=encoder, input=TOO_LONG)
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        api.embeddings.create(model=encoder, input="x", dimensions=3)
