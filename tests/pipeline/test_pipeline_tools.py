"""The built-in model calls tools and thinks, seen through the OpenAI SDK."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import openai
import pytest
from support.pipeline.served import BUILT_IN, Served, SharedServers
from support.pipeline.stream_page import blocks, node_command, program, run_node, run_python

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
SUM = [{"role": "user", "content": "What is 17 + 25?"}]


@pytest.fixture(scope="module")
def server(shared_server: SharedServers) -> Served:
    return shared_server(*BUILT_IN)


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


def at_once(*asking: Callable[[], Any]) -> list[Any]:
    """What each is answered. A step of the model takes hardly longer with several of them."""
    with ThreadPoolExecutor(len(asking)) as threads:
        return [one.result() for one in [threads.submit(ask) for ask in asking]]


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
    answers = at_once(*(partial(ask, client, ASKED, tools=[WEATHER]) for ask in (create, streamed)))
    whole, pieces = (answer.choices[0] for answer in answers)
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
    answer, again, hidden, off = at_once(
        partial(create, client, SUM),
        partial(streamed, client, SUM, stream_options={"include_usage": True}),
        partial(create, client, SUM, extra_body={"include_reasoning": False}),
        partial(create, client, SUM, reasoning_effort="none"),
    )
    message = answer.choices[0].message
    assert message.content == "42"
    assert "17" in message.reasoning
    assert message.reasoning == message.reasoning_content
    details = answer.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens < answer.usage.completion_tokens
    assert without_ids(again.choices[0].message) == without_ids(message)
    assert again.usage.completion_tokens_details == details
    silent = hidden.choices[0].message
    assert (silent.content, getattr(silent, "reasoning", None)) == ("42", None)
    assert getattr(off.choices[0].message, "reasoning", None) is None


def responded(client: openai.OpenAI, streams: bool, **settings: Any) -> Any:
    """A response with logprobs, whole or as a stream ends with it."""
    settings |= {
        "model": "penstock-demo",
        "temperature": 0,
        "include": ["message.output_text.logprobs"],
    }
    if not streams:
        return client.responses.create(**settings)
    added, told = [], []
    for event in client.responses.create(stream=True, **settings):
        if event.type == "response.output_item.added":
            added.append(event.item.type)
        if event.type == "response.output_text.delta":
            told += event.logprobs
    assert event.type == "response.completed"
    assert added == [item.type for item in event.response.output]
    messages = [item for item in event.response.output if item.type == "message"]
    said = [part for message in messages for part in message.content]
    assert [one.token for one in told] == [one.token for part in said for one in part.logprobs]
    return event.response


@pytest.mark.parametrize("streams", [False, True])
def test_logprobs_of_a_response_are_those_of_its_text_and_open_no_item(
    client: openai.OpenAI, streams: bool
) -> None:
    tool = {"type": "function", "strict": None, **WEATHER["function"]}
    (thought, said), (*_, call) = (
        response.output
        for response in at_once(
            partial(responded, client, streams, input=SUM[0]["content"]),
            partial(responded, client, streams, input=ASKED[0]["content"], tools=[tool]),
        )
    )
    assert (thought.type, said.type) == ("reasoning", "message")
    (part,) = said.content
    assert part.text == "42"
    assert "".join(one.token for one in part.logprobs).startswith("42")
    assert len(part.logprobs) <= 3  # the end of the turn is a token as well
    assert (call.type, json.loads(call.arguments)) == ("function_call", {"city": "Oslo"})


def test_a_stop_string_ends_the_answer_and_not_the_thinking(client: openai.OpenAI) -> None:
    answer = create(client, SUM, stop=["2"]).choices[0]
    assert (answer.message.content, answer.finish_reason) == ("4", "stop")
    assert "2" in answer.message.reasoning


def test_without_tools_a_call_is_text(client: openai.OpenAI) -> None:
    offered = create(client, ASKED, tools=[WEATHER], tool_choice="none").choices[0]
    assert offered.message.tool_calls is None
    assert offered.finish_reason == "stop"


def test_a_call_is_forced_where_it_is_a_must(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "Tell me about water."}]
    named = {"type": "function", "function": {"name": "set_timer"}}
    ask = partial(create, client, question, tools=[WEATHER, TIMER])
    any_tool, many, single = at_once(
        partial(ask, tool_choice="required"),
        *(partial(ask, tool_choice=named, parallel_tool_calls=many) for many in (True, False)),
    )
    answer = any_tool.choices[0]
    assert answer.finish_reason == "tool_calls"
    for call in answer.message.tool_calls:
        assert call.function.name in {"get_weather", "set_timer"}
        json.loads(call.function.arguments)
    for parallel, answered in ((True, many), (False, single)):
        answer = answered.choices[0]
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
    ask = partial(create, client, tools=[WEATHER], response_format=format)
    question = [{"role": "user", "content": "What is 3 + 4?"}]
    for answer in at_once(partial(ask, ASKED), partial(ask, question)):
        message = answer.choices[0].message
        assert message.tool_calls or json.loads(message.content).keys() == {"a"}


def test_thinking_ends_when_its_budget_is_spent(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "What is 1234 + 2345?"}]
    ask = partial(create, client, question)
    bodies = [{"thinking_token_budget": budget} for budget in (0, 7)]
    limited = (partial(ask, extra_body=body, max_tokens=60) for body in bodies)
    free, *answers = at_once(ask, *limited)
    assert free.usage.completion_tokens_details.reasoning_tokens > 20
    for budget, answer in zip((0, 7), answers, strict=True):
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


def post(server: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def test_ids_are_those_of_all_tokens_of_prompt_thinking_calls_and_end(
    server: Served, client: openai.OpenAI
) -> None:
    ids = {"extra_body": {"return_token_ids": True}, "n": 2}
    both: list[tuple[list[Any], dict[str, Any]]] = [(ASKED, {"tools": [WEATHER, TIMER]}), (SUM, {})]
    answers = at_once(
        *(partial(create, client, messages, **ids, **offered) for messages, offered in both),
        *(
            partial(lambda *of, **settings: list(create(*of, **settings)), client, messages,
                    stream=True, **ids, **offered)
            for messages, offered in both
        ),
    )  # fmt: skip
    for (messages, offered), whole, chunks in zip(both, answers[:2], answers[2:], strict=True):
        asked = {"messages": messages, **offered}
        assert whole.prompt_token_ids == post(server, "/tokenize", asked)["tokens"]
        made = [choice.token_ids for choice in whole.choices]
        assert sum(map(len, made)) == whole.usage.completion_tokens
        text = post(server, "/detokenize", {"tokens": made[0]})["prompt"]
        assert ("<tool_call>" if offered else "</think>") in text
        assert (text.endswith("<|im_end|>")) == (whole.choices[0].finish_reason != "length")
        told, pieces = list[list[int]](), {0: list[int](), 1: list[int]()}
        for chunk in chunks:
            told += [chunk.prompt_token_ids] if hasattr(chunk, "prompt_token_ids") else []
            for choice in chunk.choices:
                pieces[choice.index] += choice.token_ids
        assert told == [whole.prompt_token_ids]
        assert list(pieces.values()) == made


def test_a_completion_has_the_ids_of_each_prompt_and_choice(server: Served) -> None:
    prompts = ["One two three", [5, 6, 7, 8]]
    body = {"prompt": prompts, "n": 2, "max_tokens": 9, "seed": 3, "echo": True, "stop": ["e"]}
    body |= {"return_token_ids": True}
    whole = post(server, "/v1/completions", body)["choices"]
    first = post(server, "/tokenize", {"prompt": prompts[0]})["tokens"]
    assert [one["prompt_token_ids"] for one in whole] == [first, first, prompts[1], prompts[1]]
    for choice in whole:
        ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
        spelled = post(server, "/detokenize", {"tokens": ids})["prompt"]
        assert choice["text"] and spelled.startswith(choice["text"])
    plain = post(server, "/v1/completions", body | {"return_token_ids": False})["choices"]
    assert not any("token_ids" in one or "prompt_token_ids" in one for one in plain)
    assert [one["text"] for one in plain] == [one["text"] for one in whole]


def test_ids_of_thinking_that_is_to_be_hidden_are_refused(client: openai.OpenAI) -> None:
    both = {"return_token_ids": True, "include_reasoning": False}
    with pytest.raises(openai.BadRequestError, match="return_token_ids and include_reasoning"):
        create(client, ASKED, extra_body=both)


def test_the_python_client_of_the_page_prints_what_the_page_says(server: Served) -> None:
    assert run_python(program("python", server.url)) == "".join(blocks("text"))


def test_the_javascript_client_of_the_page_prints_what_the_page_says(server: Served) -> None:
    command = node_command()
    if command is None:
        pytest.skip("needs Node with WebSocket")
    assert run_node(command, program("js", server.url)) == "".join(blocks("text"))


def test_many_conversations_on_one_websocket_are_those_over_http(
    server: Served, client: openai.OpenAI
) -> None:
    asked = [
        {"messages": [{"role": "user", "content": "What is 17 + 25?"}]},
        {"messages": ASKED, "tools": [WEATHER, TIMER]},
        {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 3},
        {"messages": ASKED, "tools": [WEATHER, TIMER]},
    ]
    page: dict[str, Any] = {}
    exec(blocks("python")[0], page)

    async def told(stream: Any, body: dict[str, Any]) -> tuple[Any, ...]:
        content = thought = ""
        calls: list[list[str]] = []
        ids: list[int] = []
        async for frame in stream.request("chat", temperature=0, return_token_ids=True, **body):
            ids += frame.get("token_ids", ())
            match frame["type"]:
                case "text":
                    content += frame["text"]
                case "reasoning":
                    thought += frame["text"]
                case "tool_call":
                    assert frame["call_id"].startswith("call_")
                    calls.append([frame["name"], ""])
                case "arguments":
                    calls[frame["index"]][1] += frame["text"]
        message = (content or None, thought or None, list(map(tuple, calls)))
        used = frame["usage"]["completion_tokens"]
        return message, frame["choices"][0]["finish_reason"], used, ids

    async def all_told() -> list[tuple[Any, ...]]:
        async with page["open_stream"](server.url.replace("http", "ws") + "/v1/stream") as stream:
            return await asyncio.gather(*(told(stream, body) for body in asked))

    def over_http(body: dict[str, Any]) -> tuple[Any, ...]:
        ids = {"return_token_ids": True}
        answer = create(client, body.pop("messages"), extra_body=ids, **body)
        choice, used = answer.choices[0], answer.usage.completion_tokens
        return without_ids(choice.message), choice.finish_reason, used, choice.token_ids

    assert asyncio.run(all_told()) == at_once(*(partial(over_http, dict(body)) for body in asked))
