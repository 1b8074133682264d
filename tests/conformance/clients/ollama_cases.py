"""The ``ollama`` client for Python. Its API has no way to force a call."""

from __future__ import annotations

from typing import Any

import ollama
import pytest
from asked import ANNA, MAX_TOKENS, OSLO, SUM, TOO_LONG, Person, Weather

OPTIONS = {"temperature": 0, "num_predict": MAX_TOKENS}


@pytest.fixture(scope="module")
def api(base_url: str, api_key: str) -> ollama.Client:
    return ollama.Client(host=base_url, headers={"Authorization": f"Bearer {api_key}"})


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_a_chat_is_answered_alike_whole_and_streamed(
    api: ollama.Client, model: str, demo: bool
) -> None:
    whole = api.chat(model, user(SUM), options=OPTIONS).message
    pieces = [one.message for one in api.chat(model, user(SUM), options=OPTIONS, stream=True)]
    assert whole.content == "".join(one.content or "" for one in pieces) != ""
    if demo:
        assert whole.content == "42" and "17" in whole.thinking
        assert whole.thinking == "".join(one.thinking or "" for one in pieces)


@pytest.mark.calls
def test_a_loop_of_three_calls_keeps_its_history(api: ollama.Client, model: str) -> None:
    weather, messages = Weather(), user(OSLO)
    while True:
        answer = api.chat(model, messages, tools=[weather.get_weather], options=OPTIONS).message
        messages.append(answer)
        if not answer.tool_calls:
            break
        (call,) = answer.tool_calls
        result = weather.get_weather(**call.function.arguments)
        messages.append({"role": "tool", "tool_name": "get_weather", "content": result})
    assert weather.called_three_times() and answer.content


def test_an_answer_is_typed(api: ollama.Client, model: str, demo: bool) -> None:
    form = Person.model_json_schema()
    answer = api.chat(model, user(ANNA), format=form, options=OPTIONS, think=False).message
    person = Person.model_validate_json(answer.content)
    assert person.age == 36 or not demo


def test_errors_have_a_status(api: ollama.Client, base_url: str, model: str) -> None:
    stranger = ollama.Client(host=base_url, headers={"Authorization": "Bearer wrong"})
    for client, name, options, status in (
        (api, "none-such", OPTIONS, 404),
        (api, model, {**OPTIONS, "temperature": 1e9}, 400),
        (stranger, model, OPTIONS, 401),
    ):
        with pytest.raises(ollama.ResponseError) as refused:
            client.chat(name, user(SUM), options=options)
        assert refused.value.status_code == status
    with pytest.raises(ollama.ResponseError, match="prompt is too long"):
        list(api.chat(model, user(TOO_LONG), options=OPTIONS, stream=True))
