"""The ``ollama`` Python client works unchanged, and KoboldAI's routes and the tokens' beside it say
the same as OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest
from support.pipeline.served import Served, served

pytestmark = pytest.mark.slow

MODEL = "penstock-demo"
ASKED = [{"role": "user", "content": "What is the weather in Oslo?"}]
SUM = [{"role": "user", "content": "What is 17 + 25?"}]
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    # Texts of two requests are the same bit for bit only in float32.
    with served("--device", "cpu", "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Served) -> ollama.Client:
    return ollama.Client(host=server.url)


def get_weather(city: str) -> str:
    """Get the weather of a city

    Args:
      city: The city
    """
    return "light rain"


def told(chunks: Iterator[ollama.ChatResponse]) -> tuple[str, str, ollama.ChatResponse]:
    """Text, thinking and the last line of a stream."""
    found = list(chunks)
    text = "".join(one.message.content or "" for one in found)
    thinking = "".join(one.message.thinking or "" for one in found)
    assert [one.done for one in found] == [False] * (len(found) - 1) + [True]
    return text, thinking, found[-1]


def test_a_chat_is_answered_alike_whole_and_streamed_and_as_by_chat_completions(
    server: Served, client: ollama.Client
) -> None:
    whole = client.chat(MODEL, SUM, options=GREEDY)
    assert (whole.message.content, whole.done_reason) == ("42", "stop")
    assert "17" in (whole.message.thinking or "")
    text, thinking, last = told(client.chat(MODEL, SUM, stream=True, options=GREEDY))
    assert (text, thinking) == (whole.message.content, whole.message.thinking)
    assert last.total_duration and last.eval_duration
    _, answer = server.post("/v1/chat/completions", {"messages": SUM, **GREEDY})
    message, usage = answer["choices"][0]["message"], answer["usage"]
    assert (message["content"], message["reasoning"]) == (text, thinking)
    for one in (whole, last):
        counts = (one.prompt_eval_count, one.eval_count)
        assert counts == (usage["prompt_tokens"], usage["completion_tokens"])


def test_a_function_is_called_and_its_result_is_told(client: ollama.Client) -> None:
    answer = client.chat(MODEL, ASKED, tools=[get_weather], options=GREEDY)
    (call,) = answer.message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Oslo"})
    chunks = client.chat(MODEL, ASKED, tools=[get_weather], options=GREEDY, stream=True)
    calls = [one for chunk in chunks for one in chunk.message.tool_calls or ()]
    assert calls == [call]
    result = {"role": "tool", "tool_name": "get_weather", "content": get_weather("Oslo")}
    messages: list[Any] = [*ASKED, answer.message, result]
    last = client.chat(MODEL, messages, tools=[get_weather], options=GREEDY)
    assert "light rain" in (last.message.content or "")


def test_an_answer_has_the_form_that_is_asked_for(client: ollama.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer"}},
        "required": ["age"],
        "additionalProperties": False,
    }
    options = {**GREEDY, "num_predict": 60}
    answer = client.generate(MODEL, "How old are you?", format=schema, options=options, think=False)
    if answer.done_reason == "stop":
        assert isinstance(json.loads(answer.response or "")["age"], int)


def test_a_prompt_is_continued_raw_with_the_options_that_it_has(client: ollama.Client) -> None:
    options = {"seed": 7, "num_predict": 5, "temperature": 0.8}
    one, two = (
        client.generate(MODEL, "The river", raw=True, options=options, stream=False)
        for _ in range(2)
    )
    assert (one.response, one.done_reason, one.eval_count) == (two.response, "length", 5)


def test_models_are_listed_shown_and_running(client: ollama.Client) -> None:
    assert MODEL in [one.model for one in client.list().models]
    assert MODEL in [one.model for one in client.ps().models]
    shown = client.show(MODEL)
    assert "tools" in (shown.capabilities or ())
    assert (shown.modelinfo or {})["penstock.context_length"] > 0


def test_errors_have_a_status_and_a_sentence(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="does not exist") as caught:
        client.chat("none", SUM)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="mirostat") as caught:
        list(client.chat(MODEL, SUM, options={"mirostat": 1}, stream=True))
    assert caught.value.status_code == 400


def test_ids_of_a_chat_are_its_prompt_and_become_its_text(server: Served) -> None:
    status, tokens = server.post("/tokenize", {"messages": SUM})
    assert (status, tokens["count"]) == (200, len(tokens["tokens"]))
    _, answer = server.post("/v1/chat/completions", {"messages": SUM, "max_tokens": 1})
    assert answer["usage"]["prompt_tokens"] == tokens["count"]
    _, text = server.post("/detokenize", {"tokens": tokens["tokens"]})
    assert "What is 17 + 25?" in text["prompt"]
    plain = {"prompt": text["prompt"], "add_special_tokens": False}
    assert server.post("/tokenize", plain)[1]["count"] >= tokens["count"]


def test_koboldai_continues_a_prompt_as_completions_do(server: Served) -> None:
    prompt = "The river flows"
    asked = {"prompt": prompt, "max_length": 8, "temperature": 0}
    _, kobold = server.post("/api/v1/generate", asked)
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    _, openai = server.post("/v1/completions", body)
    assert kobold["results"][0]["text"] == openai["choices"][0]["text"]
    _, count = server.post("/api/extra/tokencount", {"prompt": prompt})
    assert count["value"] == openai["usage"]["prompt_tokens"]
