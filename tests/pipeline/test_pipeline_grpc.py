"""gRPC of a whole server, with the stubs that any client has."""

from __future__ import annotations

import asyncio
import json
import random
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from support.pipeline.grpc_client import address_of, details_of, gathered, stub_of
from support.pipeline.served import BUILT_IN, Served, SharedServers
from support.polling import until

from penstock.protocol.grpc import penstock_pb2 as pb

MODEL = "penstock-demo"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}


@pytest.fixture(scope="module")
def server(shared_server: SharedServers) -> Served:
    return shared_server(*BUILT_IN)


@pytest.fixture(scope="module")
def channel(server: Served) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address_of(server)) as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> Any:
    return stub_of(channel)


def said(role: str, content: str) -> pb.Message:
    return pb.Message(role=role, content=content)


LONG_TOKENS = 1500


def long_request(**options: Any) -> pb.GenerateRequest:
    """One that runs for seconds."""
    sampling = pb.Sampling(max_tokens=LONG_TOKENS, ignore_eos=True, seed=1)
    return pb.GenerateRequest(text="Once", sampling=sampling, options=pb.Options(**options))


def test_a_seeded_completion_is_that_of_http(server: Served, stub: Any) -> None:
    sampling = {"max_tokens": 24, "temperature": 1.5, "seed": 7, "n": 3, "logprobs": 2}
    status, body = server.post(
        "/v1/completions", {"prompt": "Tell me", "return_token_ids": True, **sampling}
    )
    assert status == 200, body
    asked = pb.GenerateRequest(
        text="Tell me",
        sampling=pb.Sampling(**sampling),
        options=pb.Options(return_token_ids=True),
    )
    found = gathered(stub.Generate(asked), 3)
    assert found.model == MODEL
    assert found.texts == [choice["text"] for choice in body["choices"]]
    assert found.token_ids == [choice["token_ids"] for choice in body["choices"]]
    assert found.prompt_token_ids == body["choices"][0]["prompt_token_ids"]
    assert [one.lower() for one in found.finishes] == [
        choice["finish_reason"] for choice in body["choices"]
    ]
    for mine, choice in zip(found.logprobs, body["choices"], strict=True):
        columns = choice["logprobs"]["token_logprobs"]
        assert [one.logprob for one in mine] == pytest.approx(columns, abs=1e-4)
        assert all(len(one.top) == 2 for one in mine)
    usage = body["usage"]
    assert found.usage.prompt_tokens == usage["prompt_tokens"]
    assert found.usage.completion_tokens == usage["completion_tokens"]


def test_a_chat_with_tools_is_that_of_http(server: Served, stub: Any) -> None:
    tool = {"name": "get_weather", "description": "Get the weather.", "parameters": WEATHER}
    messages = [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "What is the weather in Oslo?"},
    ]
    status, body = server.post(
        "/v1/chat/completions",
        {
            "messages": messages,
            "tools": [{"type": "function", "function": tool}],
            "temperature": 0,
            "tool_choice": "required",
            "max_tokens": 200,
        },
    )
    assert status == 200, body
    asked = pb.ChatRequest(
        messages=[pb.Message(**one) for one in messages],
        tools=[pb.Tool(**{**tool, "parameters": json.dumps(WEATHER)})],
        tool_choice="required",
        sampling=pb.Sampling(temperature=0, max_tokens=200),
    )
    found = gathered(stub.Chat(asked))
    message = body["choices"][0]["message"]
    calls = [one["function"] for one in message["tool_calls"]]
    assert [(name, text) for _, name, text in found.calls[0].values()] == [
        (one["name"], one["arguments"]) for one in calls
    ]
    assert found.thoughts[0] == (message.get("reasoning") or "")
    assert found.finishes == ["TOOL_CALLS"]
    assert found.usage.completion_tokens == body["usage"]["completion_tokens"]
    whole = gathered(stub.Chat(_whole(asked)))
    assert whole._replace(id="", messages=0, usage=found.usage) == found._replace(
        id="", messages=0, calls=whole.calls
    )
    assert whole.messages == 1
    assert whole.usage.completion_tokens == found.usage.completion_tokens


def _whole(asked: pb.ChatRequest) -> pb.ChatRequest:
    copy = pb.ChatRequest()
    copy.CopyFrom(asked)
    copy.options.stream = False
    return copy


def test_a_prompt_of_token_ids_has_its_logprobs_and_can_be_echoed(
    server: Served, stub: Any
) -> None:
    ids = stub.Tokenize(pb.TokenizeRequest(text="Hello there")).token_ids
    assert list(ids) == server.post("/tokenize", {"prompt": "Hello there"})[1]["tokens"]
    asked = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ids),
        sampling=pb.Sampling(max_tokens=1, echo=True, prompt_logprobs=1),
        options=pb.Options(stream=False),
    )
    found = gathered(stub.Generate(asked))
    assert found.texts[0].startswith("Hello there")
    first, *others = found.prompt_logprobs
    assert not first.HasField("logprob")
    assert [one.token_id for one in others] == list(ids[1:])
    assert b"".join(one.token for one in found.prompt_logprobs) == b"Hello there"


def test_a_conversation_is_tokenized_by_its_template(server: Served, stub: Any) -> None:
    answer = stub.Tokenize(pb.TokenizeRequest(messages=[said("user", "Hello")]))
    messages = [{"role": "user", "content": "Hello"}]
    body = server.post("/tokenize", {"messages": messages})[1]
    assert list(answer.token_ids) == body["tokens"]
    assert answer.max_model_len == body["max_model_len"]


@pytest.mark.parametrize(
    ("asked", "code", "param", "said"),
    [
        (pb.ChatRequest(), "INVALID_ARGUMENT", "messages", "messages is empty"),
        (
            pb.ChatRequest(model="other", messages=[said("user", "Hello")]),
            "NOT_FOUND",
            "model",
            "'other' does not exist; served here: 'penstock-demo'",
        ),
        (
            pb.ChatRequest(messages=[said("user", "Hello")], sampling=pb.Sampling(temperature=300)),
            "INVALID_ARGUMENT",
            "temperature",
            "temperature is 300.0; 0 to 100 is allowed",
        ),
        (
            pb.ChatRequest(messages=[said("user", "Hello")], sampling=pb.Sampling(echo=True)),
            "INVALID_ARGUMENT",
            "echo",
            "not supported yet: echo",
        ),
        (
            pb.ChatRequest(
                messages=[said("user", "Hello")], tools=[pb.Tool(name="a", parameters="{")]
            ),
            "INVALID_ARGUMENT",
            "tools",
            "tools[0].parameters is not valid JSON",
        ),
        (
            pb.ChatRequest(messages=[pb.Message()] * 8193),
            "INVALID_ARGUMENT",
            "messages",
            "messages has 8193 items; at most 8192 are allowed",
        ),
        (
            pb.ChatRequest(messages=[said("user", "a" * 20_000)]),
            "INVALID_ARGUMENT",
            "messages",
            "too long",
        ),
    ],
    ids=[
        "no messages",
        "no such model",
        "a bad value",
        "not for chats",
        "bad JSON",
        "too many",
        "too long",
    ],
)
def test_an_error_has_a_code_and_says_which_field_and_what_is_allowed(
    stub: Any, asked: pb.ChatRequest, code: str, param: str, said: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Chat(asked, metadata=[("x-request-id", "asked-1")]))
    assert caught.value.code().name == code
    assert said in caught.value.details()
    details = details_of(caught.value)
    assert details["BadRequest"].field_violations[0].field == param
    assert details["RequestInfo"].request_id == "asked-1"


def test_a_message_that_is_none_or_too_large_is_refused(channel: grpc.Channel) -> None:
    call = channel.unary_stream("/penstock.v1.Penstock/Generate")
    with pytest.raises(grpc.RpcError) as caught:
        list(call(b"\xff\xff\xff"))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "The message is no penstock.v1.GenerateRequest" in caught.value.details()
    large = pb.GenerateRequest(text="a" * 9_000_000).SerializeToString()
    with pytest.raises(grpc.RpcError) as caught:
        list(call(large))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_deadline_ends_the_request_in_the_server_too(server: Served, stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(long_request(), timeout=0.4))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(long_request(deadline_s=0.3), timeout=30))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "its deadline_s" in caught.value.details()
    assert server.settled()["penstock_requests_running"] == 0


def test_a_cancelled_stream_frees_its_blocks(server: Served, stub: Any) -> None:
    """And makes no more of its tokens."""
    before = server.settled()["penstock_generation_tokens_total"]
    stream = stub.Generate(long_request(), metadata=[("x-request-id", "left-1")])
    next(stream)
    stream.cancel()
    settled = server.settled()
    assert settled["penstock_kv_blocks_used"] == 0
    assert settled["penstock_generation_tokens_total"] - before < LONG_TOKENS
    line = server.find(r'(\{"id":"left-1".*)')
    assert '"status":499' in line
    assert '"route":"/penstock.v1.Penstock/Generate"' in line


def test_a_running_request_is_known_and_ended_by_its_id(server: Served, stub: Any) -> None:
    stream = stub.Generate(long_request(), metadata=[("x-request-id", "mine-1")])
    assert next(stream).id == "mine-1"
    with urllib.request.urlopen(server.url + "/v1/requests/mine-1", timeout=10) as answer:
        assert json.load(answer)["id"] == "mine-1"
    assert list(stub.Abort(pb.AbortRequest(ids=["mine-1", "none", "mine-1"])).aborted) == ["mine-1"]
    with pytest.raises(grpc.RpcError) as caught:
        list(stream)
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert list(stub.Abort(pb.AbortRequest(ids=["mine-1"])).aborted) == []


def test_two_hundred_streams_run_at_once(server: Served, channel: grpc.Channel, stub: Any) -> None:
    def ask(number: int) -> str:
        sampling = pb.Sampling(max_tokens=16, seed=number, temperature=2.0, ignore_eos=True)
        return gathered(stub.Generate(pb.GenerateRequest(text="Hi", sampling=sampling))).texts[0]

    with ThreadPoolExecutor(200) as pool:
        texts = list(pool.map(ask, [number % 50 for number in range(200)]))
    assert texts[:50] * 4 == texts
    assert len(set(texts)) > 20


@pytest.mark.slow
def test_a_thousand_streams_run_at_once_while_a_third_of_them_is_cancelled(server: Served) -> None:
    drawn = random.Random(1)

    def asked(number: int) -> pb.GenerateRequest:
        sampling = pb.Sampling(max_tokens=24, seed=number % 25, temperature=2.0, ignore_eos=True)
        return pb.GenerateRequest(text="Hi", sampling=sampling)

    async def ask(stub: Any, number: int, leaves_after: int) -> str:
        stream, messages = stub.Generate(asked(number)), []
        async for message in stream:
            messages.append(message)
            if len(messages) == leaves_after:
                stream.cancel()
                return ""
        return gathered(messages).texts[0]

    async def all_at_once() -> list[str]:
        async with grpc.aio.insecure_channel(address_of(server)) as channel:
            stub = stub_of(channel)
            leaves = [drawn.randint(1, 8) if drawn.random() < 1 / 3 else 0 for _ in range(1000)]
            streams = (ask(stub, number, after) for number, after in enumerate(leaves))
            texts = await asyncio.gather(*streams)
            assert [not text for text in texts] == [after > 0 for after in leaves]
            return texts

    texts = asyncio.run(all_at_once())
    for seed in range(25):
        assert len({text for text in texts[seed::25] if text}) == 1
    assert len(set(texts)) == 26
    assert server.settled()["penstock_kv_blocks_used"] == 0


def test_stock_stubs_find_health_and_the_services(channel: grpc.Channel, stub: Any) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", "penstock.v1.Penstock", MODEL):
        answer = health.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(health_pb2.HealthCheckRequest(service="other"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    database = ProtoReflectionDescriptorDatabase(channel)
    assert {"penstock.v1.Penstock", "grpc.health.v1.Health"} <= set(database.get_services())
    service = DescriptorPool(database).FindServiceByName("penstock.v1.Penstock")
    assert {"Generate", "Chat", "Embed", "Score", "Tokenize", "Models", "Abort"} <= set(
        service.methods_by_name
    )
    (model,) = stub.Models(pb.ModelsRequest()).models
    assert (model.names[0], model.ready, model.tasks[0]) == (MODEL, True, "generate")


def test_calls_are_counted_by_method_and_code(server: Served, stub: Any) -> None:
    stub.Models(pb.ModelsRequest())

    def counted() -> str:
        with urllib.request.urlopen(server.url + "/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    row = 'penstock_grpc_requests_total{code="OK",method="/penstock.v1.Penstock/Models"}'
    until(lambda: row in counted(), 30)
