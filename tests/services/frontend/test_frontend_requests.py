"""What reaches the gateway from a good request, and what an unstreamed answer looks like."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from support.frontend.frontend_scripted import LENGTH, Client, rejected, run, say

from penstock.client.sink import Sink
from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.grammar.request import Grammar
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.requests import Chat, PromptText, Tokens, Work
from penstock.protocol.wire.messages.tokens import End, EndReason

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def works_of(path: str, body: dict[str, Any], **kwargs: Any) -> list[Work]:
    async def use(client: Client) -> None:
        status, answer, _ = await client.post(path, body, **kwargs)
        assert status == 200, answer

    return run(use).works


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], **fields}


def test_a_chat_answer_has_the_openai_shape() -> None:
    async def use(client: Client) -> None:
        status, answer, response = await client.post(CHAT, chat(model="org/model"))
        assert status == 200
        assert response.content_type == "application/json"
        assert answer.pop("id").startswith("chatcmpl-")
        assert isinstance(answer.pop("created"), int)
        assert answer == {
            "object": "chat.completion",
            "model": "org/model",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "Hello world", "refusal": None},
                    "logprobs": None,
                    "finish_reason": "length",
                    "stop_reason": None,
                }
            ],
            "usage": {
                "prompt_tokens": 3,
                "completion_tokens": 2,
                "total_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
        }

    run(use, say("Hello", " world", end=LENGTH))


def test_the_stop_that_was_found_is_named() -> None:
    async def use(client: Client) -> None:
        _, answer, _ = await client.post(TEXT, {"prompt": "x"})
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["stop_reason"] == "END"

    run(use, say("a", end=End(0, EndReason.STOP, stop="END")))


def test_every_sampling_parameter_reaches_the_gateway() -> None:
    body = chat(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        seed=-3,
        n=2,
        max_tokens=11,
        stop=["a", "b"],
        stop_token_ids=[5],
        ignore_eos=True,
    )
    (work,) = works_of(CHAT, body)
    assert work.params == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        seed=-3,
        n=2,
        max_tokens=11,
        stop=["a", "b"],
        stop_token_ids=[5],
        ignore_eos=True,
    )
    assert len(work.choices) == 2


FORMS: list[tuple[dict[str, Any], Grammar]] = [
    (
        {"response_format": {"type": "json_object"}},
        Grammar("json_object", param="response_format"),
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "strict": True, "schema": {"type": "array"}},
            }
        },
        Grammar("json_schema", '{"type":"array"}', param="response_format"),
    ),
    (
        {"structured_outputs": {"regex": "a+"}, "response_format": {"type": "text"}},
        Grammar("regex", "a+"),
    ),
    ({"structured_outputs": {"choice": ["b", "a"]}}, Grammar("choice", '["b","a"]')),
]


@pytest.mark.parametrize(("fields", "grammar"), FORMS)
def test_the_form_of_an_answer_reaches_the_gateway_as_a_grammar(
    fields: dict[str, Any], grammar: Grammar
) -> None:
    for work in (*works_of(CHAT, chat(**fields)), *works_of(TEXT, {"prompt": "x", **fields})):
        assert work.params.structured_outputs == grammar


@pytest.mark.parametrize("priority", [-(2**31), -1, 0, 2**31 - 1])
def test_priority_and_cache_salt_reach_the_gateway_for_every_prompt(priority: int) -> None:
    body = {"prompt": ["a", "b"], "priority": priority, "cache_salt": "mine é"}
    works = works_of(TEXT, body)
    assert [(work.head.priority, work.head.cache_salt) for work in works] == [
        (priority, "mine é")
    ] * 2
    (work,) = works_of(CHAT, chat(priority=priority, cache_salt="s"))
    assert (work.head.priority, work.head.cache_salt) == (priority, "s")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat()),
        (TEXT, {"prompt": ["a", "b"]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", chat(max_tokens=5, model="org/model")),
    ],
)
def test_an_answer_that_repeats_is_asked_for_in_every_api(path: str, body: dict[str, Any]) -> None:
    for asked in (True, False):
        works = works_of(path, {**body, "deterministic": asked})
        assert works and all(work.head.deterministic is asked for work in works)
    assert not any(work.head.deterministic for work in works_of(path, body))


def test_callers_with_different_keys_never_have_the_same_cache_salt() -> None:
    async def use(client: Client) -> None:
        for key in ("key-one", "key-two"):
            for salt in ("", "a"):
                body = {"prompt": "x", "cache_salt": salt}
                for _ in range(2):
                    await client.post(TEXT, body, headers={"x-api-key": key})

    works = run(use, config=ServerConfig(api_key=["key-one", "key-two"])).works
    salts = [work.head.cache_salt for work in works]
    assert len(salts) == 8
    assert len(set(salts)) == 4
    assert salts[0::2] == salts[1::2]
    assert all(len(salt) == 32 for salt in salts)


def test_priority_and_cache_salt_are_zero_and_empty_where_they_are_left_out() -> None:
    for fields in ({}, {"priority": None, "cache_salt": None}, {"priority": 0, "cache_salt": ""}):
        (work,) = works_of(CHAT, chat(**fields))
        assert (work.head.priority, work.head.cache_salt) == (0, "")


def test_null_fields_are_as_absent_and_defaults_are_the_customary_ones() -> None:
    nulls = dict.fromkeys(
        ("temperature", "top_p", "seed", "stop", "n", "logprobs", "tools", "stream", "user"), None
    )
    (work,) = works_of(CHAT, chat(**nulls, stream_options=None, max_tokens=None, model=None))
    assert work.params == SamplingParams()
    (work,) = works_of(TEXT, {"prompt": "x", "max_tokens": None})
    assert work.params == SamplingParams(max_tokens=16)


def test_max_completion_tokens_is_max_tokens_and_one_stop_string_is_a_list() -> None:
    (work,) = works_of(CHAT, chat(max_completion_tokens=9, stop="x"))
    assert work.params.max_tokens == 9
    assert work.params.stop == ["x"]


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": False, "top_logprobs": 0},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
        {"tools": [], "tool_choice": "none"},
        {"tool_choice": "auto", "parallel_tool_calls": True},
        {"response_format": {"type": "text"}, "logit_bias": {}},
        {"user": "me@example.org", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"min_p": 0, "min_tokens": 0, "best_of": 2, "n": 2, "skip_special_tokens": True},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_parameters_with_their_neutral_value_are_accepted(fields: dict[str, Any]) -> None:
    assert len(works_of(CHAT, chat(**fields))) == 1


def test_prompts_come_as_text_token_ids_or_lists_of_either() -> None:
    def prompts(value: Any) -> list[Any]:
        return [work.prompt for work in works_of(TEXT, {"prompt": value})]

    def tokens(*ids: int) -> Tokens:
        return Tokens(struct.pack(f"<{len(ids)}i", *ids))

    assert prompts("one") == [PromptText("one")]
    assert prompts(["one"]) == [PromptText("one")]
    assert prompts(["one", "two"]) == [PromptText("one"), PromptText("two")]
    assert prompts([1, 2, 999]) == [tokens(1, 2, 999)]
    assert prompts([[1], [0, 3]]) == [tokens(1), tokens(0, 3)]
    assert prompts(["one", [4]]) == [PromptText("one"), tokens(4)]


def test_messages_are_normalized() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": "c",
            "refusal": None,
            "tool_calls": None,
            "annotations": [],
            "audio": None,
            "reasoning_content": "hm",
        },
        {"role": "user", "content": "", "name": "Ann"},
    ]
    body = {"messages": messages, "chat_template_kwargs": {"enable_thinking": True}}
    (work,) = works_of(CHAT, body)
    assert isinstance(work.prompt, Chat)
    assert msgspec.json.decode(work.prompt.messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "reasoning_content": "hm"},
        {"role": "user", "content": "", "name": "Ann"},
    ]
    assert msgspec.json.decode(work.prompt.template_kwargs) == {"enable_thinking": True}


@pytest.mark.parametrize("message", [{"content": None}, {}, {"content": None, "tool_calls": []}])
def test_an_assistants_message_without_content_is_empty(message: dict[str, Any]) -> None:
    (work,) = works_of(
        CHAT, {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", **message}]}
    )
    assert isinstance(work.prompt, Chat)
    assert msgspec.json.decode(work.prompt.messages)[1] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {}),
        ({"add_generation_prompt": True, "continue_final_message": False}, {}),
        ({"add_generation_prompt": None, "continue_final_message": None}, {}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        (
            {"add_generation_prompt": False, "continue_final_message": True},
            {"add_generation_prompt": False, "continue_final_message": True},
        ),
        (
            {"continue_final_message": True},
            {"add_generation_prompt": False, "continue_final_message": True},
        ),
    ],
)
def test_a_chat_says_how_its_prompt_ends(fields: dict[str, Any], variables: dict[str, Any]) -> None:
    (work,) = works_of(CHAT, chat(**fields))
    assert isinstance(work.prompt, Chat)
    assert msgspec.json.decode(work.prompt.template_kwargs) == variables


USER = {"user": "ann"}
DIALECTS: list[tuple[str, dict[str, Any], dict[str, Any] | None]] = [
    (TEXT, {"prompt": "x"}, USER),
    (CHAT, chat(), USER),
    ("/v1/responses", {"input": "x"}, USER),
    ("/v1/messages", chat(max_tokens=2), {"metadata": {"user_id": "ann"}}),
    ("/api/chat", chat(stream=False, model="org/model"), None),
    ("/api/generate", {"prompt": "x", "stream": False, "model": "org/model"}, None),
    ("/api/v1/generate", {"prompt": "x"}, None),
]


@pytest.mark.parametrize(("path", "body", "user"), DIALECTS)
def test_the_tenant_is_the_key_else_the_user_else_the_address_in_every_dialect(
    path: str, body: dict[str, Any], user: dict[str, Any] | None
) -> None:
    async def without_keys(client: Client) -> None:
        for fields in [{}, *([user] if user else [])]:
            await client.post(path, body | fields)

    async def with_keys(client: Client) -> None:
        for key in ("first-key", "second-key", "first-key"):
            headers = {"Authorization": f"Bearer {key}"}
            await client.post(path, body | (user or {}), headers=headers)

    tenants = [work.head.tenant for work in run(without_keys).works]
    assert tenants == ["at 127.0.0.1", *(["ann"] if user else [])]

    gateway = run(with_keys, config=ServerConfig(api_key=["first-key", "second-key"]))
    one, two, again = (work.head.tenant for work in gateway.works)
    assert one == again != two
    assert "first" not in one and 1 <= len(one) <= 32


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_the_head_says_what_the_client_sees_and_which_model_is_meant() -> None:
    headers = {"x-request-id": "mine-1", "traceparent": TRACE}
    works = works_of(TEXT, {"model": "alias", "prompt": ["a", "b"], "n": 2}, headers=headers)
    assert len(works) == 2
    for work in works:
        head = work.head
        assert (head.request_id, head.model, head.task) == ("mine-1", "org/model", "generate")
        assert (head.trace, head.prompt_kind, head.siblings) == (TRACE, "text", 4)
    (work,) = works_of(CHAT, chat())
    assert work.head.request_id.startswith("req-")
    assert (work.head.trace, work.head.prompt_kind) == ("", "chat")


@pytest.mark.parametrize(
    "given",
    [
        *("", "00", TRACE[:-1], TRACE.replace("4bf9", "wxyz"), f"ff{TRACE[2:]}", f"{TRACE}01"),
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01",
        f"{TRACE}-{'x' * 101}",
    ],
)
def test_a_trace_context_that_cannot_be_read_is_ignored(given: str) -> None:
    (work,) = works_of(TEXT, {"prompt": "x"}, headers={"traceparent": given})
    assert work.head.trace == ""


@pytest.mark.parametrize("given", [TRACE, TRACE.upper(), f" {TRACE} ", f"cc{TRACE[2:]}-what-more"])
def test_a_trace_context_of_any_version_is_taken(given: str) -> None:
    (work,) = works_of(TEXT, {"prompt": "x"}, headers={"traceparent": given})
    assert work.head.trace == given.strip()


def test_a_request_may_take_only_so_long() -> None:
    async def script(work: Work, sink: Sink) -> None:
        import asyncio

        sink.on_accepted(1)
        await asyncio.sleep(60)

    async def use(client: Client) -> None:
        status, answer, _ = await client.post(TEXT, {"prompt": "x"})
        assert status == 504
        assert answer["error"]["type"] == "timeout_error"
        assert "0.2 s" in answer["error"]["message"]
        (event,) = await client.events(TEXT, {"prompt": "x"})
        assert event["error"]["type"] == "timeout_error"

    gateway = run(use, script, ServerConfig(request_timeout_s=0.2))
    assert gateway.cancelled == [1, 2]
    assert gateway.works[0].head.time_left == pytest.approx(0.2, abs=0.1)


def test_a_client_can_ask_for_less_time_and_not_for_more() -> None:
    async def script(work: Work, sink: Sink) -> None:
        import asyncio

        sink.on_accepted(1)
        await asyncio.sleep(60)

    async def use(client: Client) -> None:
        for wanted, words in ((0.1, "0.1 s; its deadline_s"), (50, "0.3 s; --request-timeout-s")):
            status, answer, _ = await client.post(TEXT, {"prompt": "x", "deadline_s": wanted})
            assert status == 504
            assert words in answer["error"]["message"]

    gateway = run(use, script, ServerConfig(request_timeout_s=0.3))
    left = [work.head.time_left for work in gateway.works]
    assert left == [pytest.approx(0.1, abs=0.05), pytest.approx(0.3, abs=0.05)]


def test_an_overloaded_gateway_is_a_503_at_once() -> None:
    async def use(client: Client) -> None:
        client.gateway.overloaded = rejected(503, "full", kind="overloaded_error", retry_after=5.0)
        for stream in (False, True):
            status, answer, response = await client.post(TEXT, {"prompt": "x", "stream": stream})
            assert status == 503
            assert answer["error"]["message"] == "full"
            assert response.headers["Retry-After"] == "5"

    run(use)


def test_no_model_yet_is_a_503_and_not_an_unknown_model() -> None:
    async def use(client: Client) -> None:
        client.gateway.served = []
        status, _, response = await client.post(TEXT, {"prompt": "x", "model": "org/model"})
        assert status == 503
        assert "Retry-After" in response.headers

    run(use)


def test_latencies_and_finish_reasons_are_counted() -> None:
    async def use(client: Client) -> None:
        await client.events(TEXT, {"prompt": "x", "n": 2})
        await client.post(TEXT, {"prompt": "x"})
        await client.post(TEXT, {"prompt": ""})
        _, text, _ = await client.get("/metrics")
        lines = dict(line.rsplit(" ", 1) for line in text.decode().splitlines() if line[0] != "#")
        assert lines["penstock_time_to_first_token_seconds_count"] == "2.0"
        assert lines["penstock_inter_token_latency_seconds_count"] == "6.0"
        assert lines["penstock_e2e_request_latency_seconds_count"] == "2.0"
        assert lines['penstock_requests_finished_total{reason="stop"}'] == "3.0"
        assert lines['penstock_key_requests_total{key=""}'] == "2.0"
        assert lines["penstock_request_generation_tokens_sum"] == "9.0"
        assert lines["penstock_time_per_output_token_seconds_count"] == "2.0"
        name = "penstock_http_requests_total"
        assert lines[f'{name}{{route="/v1/completions",status="200"}}'] == "2.0"
        assert lines[f'{name}{{route="/v1/completions",status="400"}}'] == "1.0"

    run(use, say("a", "b", "c"))
