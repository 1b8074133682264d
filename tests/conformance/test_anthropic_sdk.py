"""Anthropic's Python SDK against a whole server with the built-in model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pydantic
import pytest
from support.pipeline.served import Served, served

pytestmark = pytest.mark.slow

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
OSLO: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
SUM: list[Any] = [{"role": "user", "content": "What is 17 + 25?"}]
THINKS: dict[str, Any] = {"type": "adaptive"}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    # Texts of two requests are the same bit for bit only in float32.
    with served("--device", "cpu", "--dtype", "float32") as server:
        yield server


@pytest.fixture
def client(server: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        yield client


def asked(messages: list[Any], **settings: Any) -> dict[str, Any]:
    given = {"model": "penstock-demo", "max_tokens": 200, "messages": messages, **settings}
    return {**given, "extra_body": {"temperature": 0, **given.pop("extra_body", {})}}


def create(client: anthropic.Anthropic, messages: list[Any], **settings: Any) -> Any:
    return client.messages.create(**asked(messages, **settings))


def streamed(client: anthropic.Anthropic, messages: list[Any], **settings: Any) -> Any:
    """The message that the SDK puts together from a stream."""
    with client.messages.stream(**asked(messages, **settings)) as events:
        for _ in events:
            pass
        return events.get_final_message()


def said(message: Any) -> list[tuple[Any, ...]]:
    """The blocks without the ids of calls, and why the message ended."""
    found: list[tuple[Any, ...]] = [(message.stop_reason, message.stop_sequence)]
    for block in message.content:
        match block.type:
            case "text":
                found.append((block.text,))
            case "thinking":
                found.append((block.thinking, block.signature))
            case "tool_use":
                found.append((block.name, block.input))
    return found


def test_a_tool_is_called_and_its_result_is_told(client: anthropic.Anthropic) -> None:
    answer = create(client, OSLO, tools=[WEATHER])
    assert said(answer) == [("tool_use", None), ("get_weather", {"city": "Oslo"})]
    assert said(streamed(client, OSLO, tools=[WEATHER])) == said(answer)
    result = {"type": "tool_result", "tool_use_id": answer.content[0].id, "content": "rain"}
    history = [*OSLO, {"role": "assistant", "content": answer.content}]
    told = create(client, [*history, {"role": "user", "content": [result]}], tools=[WEATHER])
    assert told.stop_reason == "end_turn"
    assert "rain" in told.content[0].text


def test_thinking_is_a_block_where_it_is_asked_for(client: anthropic.Anthropic) -> None:
    answer = create(client, SUM, thinking=THINKS)
    thought, text = answer.content
    assert (thought.type, text.text) == ("thinking", "42")
    assert "17" in thought.thinking and thought.signature
    details = answer.usage.output_tokens_details
    assert 0 < details.thinking_tokens < answer.usage.output_tokens
    again = streamed(client, SUM, thinking=THINKS)
    assert said(again) == said(answer)
    assert again.usage.output_tokens_details == details
    silent = streamed(client, SUM, thinking={**THINKS, "display": "omitted"})
    assert silent.content[0].thinking == "" and silent.content[1].text == "42"
    history = [*SUM, {"role": "assistant", "content": answer.content}]
    assert create(client, [*history, *OSLO]).stop_reason == "end_turn"
    without = create(client, SUM)
    assert [block.type for block in without.content] == ["text"]


def test_a_count_is_that_of_the_answer_s_prompt(client: anthropic.Anthropic) -> None:
    for messages, more in (
        (OSLO, {"tools": [WEATHER], "system": "Be brief."}),
        (SUM, {"thinking": THINKS}),
        ([*SUM, {"role": "assistant", "content": "4"}], {}),
    ):
        counted = client.messages.count_tokens(model="penstock-demo", messages=messages, **more)
        usage = create(client, messages, **more).usage
        assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_a_line_that_is_new_in_each_request_does_not_hide_the_cached_prefix(
    client: anthropic.Anthropic,
) -> None:
    rules = "Answer as one who has read all of this. " * 30
    usages = []
    for number in range(2):
        line = {"type": "text", "text": f"x-anthropic-billing-header: cch={number}f3a;"}
        system = [line, {"type": "text", "text": rules, "cache_control": {"type": "ephemeral"}}]
        usages.append(streamed(client, SUM, system=system).usage)
    first, second = usages
    assert second.cache_read_input_tokens > 200 > second.input_tokens
    whole = [one.input_tokens + one.cache_read_input_tokens for one in usages]
    assert whole[0] == whole[1]
    assert first.cache_creation_input_tokens == 0


def test_an_answer_ends_for_the_reason_that_is_said(client: anthropic.Anthropic) -> None:
    cut = create(client, SUM, max_tokens=1)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 1)
    stopped = create(client, SUM, stop_sequences=["2"], thinking=THINKS)
    reason, _, text = said(stopped)
    assert (reason, text) == (("stop_sequence", "2"), ("4",))
    assert said(streamed(client, SUM, stop_sequences=["2"], thinking=THINKS)) == said(stopped)
    assert streamed(client, SUM, max_tokens=10**6).stop_reason == "end_turn"


def test_the_assistant_s_last_words_are_continued(client: anthropic.Anthropic) -> None:
    hello = [{"role": "user", "content": "Hello, who are you?"}]
    text = create(client, hello).content[0].text
    middle = text.index(" ", len(text) // 2)
    begun = [*hello, {"role": "assistant", "content": text[:middle]}]
    assert create(client, begun).content[0].text == text[middle:]


class Answer(pydantic.BaseModel):
    number: int


def test_the_answer_s_form_is_that_of_a_schema(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**asked(SUM), output_format=Answer) as events:
        final = events.get_final_message()
    assert isinstance(final.parsed_output, Answer)


def test_what_is_wrong_is_raised_by_its_kind(server: Served, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens is 0") as bad:
        create(client, SUM, max_tokens=0)
    assert bad.value.request_id
    with pytest.raises(anthropic.NotFoundError, match="served here: 'penstock-demo'"):
        create(client, SUM, model="claude")
    with pytest.raises(anthropic.BadRequestError, match="web_search_20250305"):
        create(client, SUM, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    too_long = [{"role": "user", "content": "word " * 20_000}]
    with (
        pytest.raises(anthropic.BadRequestError, match="--max-model-len"),
        client.messages.stream(**asked(too_long)),
    ):
        pass
    assert [model.id for model in client.models.list()] == ["penstock-demo"]
