"""The OpenAI Python SDK against a real socket."""

from __future__ import annotations

import asyncio

import openai
import pytest
from support.frontend.frontend_scripted import Client, rejected, run, say

from penstock.client.sink import Sink
from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.wire.messages.requests import Work

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


def sdk(client: Client, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key=key, max_retries=0)


def test_chat_and_completions_streamed_and_not() -> None:
    async def use(client: Client) -> None:
        async with sdk(client) as api:
            chat = await api.chat.completions.create(
                model="org/model", messages=MESSAGES, max_completion_tokens=5, n=2
            )
            assert [choice.message.content for choice in chat.choices] == ["Hello 😀"] * 2
            assert chat.choices[0].finish_reason == "stop"
            assert chat.usage is not None
            assert chat.usage.completion_tokens == 4
            assert chat.usage.prompt_tokens_details is not None
            assert chat._request_id

            text = ""
            last = None
            chunks = await api.chat.completions.create(
                model="org/model",
                messages=MESSAGES,
                stream=True,
                stream_options={"include_usage": True},
            )
            async for chunk in chunks:
                last = chunk
                for choice in chunk.choices:
                    text += choice.delta.content or ""
            assert text == "Hello 😀"
            assert last is not None and last.usage is not None
            assert last.usage.total_tokens == 5

            answer = await api.completions.create(model="org/model", prompt=["a", "b"])
            assert [choice.text for choice in answer.choices] == ["Hello 😀"] * 2
            parts = await api.completions.create(model="org/model", prompt=[1, 2], stream=True)
            assert [part.choices[0].text async for part in parts] == ["Hello ", "😀"]

    run(use, say("Hello ", "😀"))


def test_the_stream_helper_accumulates_the_answer() -> None:
    async def use(client: Client) -> None:
        async with (
            sdk(client) as api,
            api.chat.completions.stream(model="org/model", messages=MESSAGES) as stream,
        ):
            done = await stream.get_final_completion()
        assert done.choices[0].message.content == "one two"
        assert done.choices[0].message.role == "assistant"
        assert done.choices[0].finish_reason == "stop"

    run(use, say("one", " two"))


def test_extra_body_fields_and_models() -> None:
    async def use(client: Client) -> None:
        async with sdk(client) as api:
            await api.chat.completions.create(
                model="alias",
                messages=MESSAGES,
                extra_body={"top_k": 5, "ignore_eos": True, "stop_token_ids": [7]},
            )
            assert [model.id async for model in api.models.list()] == ["org/model", "alias"]
            assert (await api.models.retrieve("org/model")).id == "org/model"
            with pytest.raises(openai.NotFoundError):
                await api.models.retrieve("none")

    gateway = run(use)
    assert gateway.works[0].params.top_k == 5
    assert gateway.works[0].params.stop_token_ids == [7]


def test_errors_become_the_exceptions_of_the_sdk() -> None:
    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        sink.on_row(0, "begun", 1)
        await asyncio.sleep(0.02)
        sink.on_rejected(rejected(503, "engine lost", kind="server_error"))

    async def use(client: Client) -> None:
        async with sdk(client) as api:
            with pytest.raises(openai.BadRequestError) as bad:
                await api.chat.completions.create(
                    model="org/model", messages=MESSAGES, temperature=-1
                )
            assert bad.value.param == "temperature"
            assert bad.value.type == "invalid_request_error"
            with pytest.raises(openai.InternalServerError, match="engine lost"):
                await api.completions.create(model="org/model", prompt="x")
            parts = await api.completions.create(model="org/model", prompt="x", stream=True)
            with pytest.raises(openai.APIError, match="engine lost"):
                assert [part async for part in parts]

    run(use, script)


def test_the_code_of_a_refused_prompt_reaches_the_client() -> None:
    code = "context_length_exceeded"

    async def script(work: Work, sink: Sink) -> None:
        sink.on_rejected(rejected(400, "too long", param="messages", code=code))

    async def use(client: Client) -> None:
        async with sdk(client) as api:
            with pytest.raises(openai.BadRequestError) as bad:
                await api.chat.completions.create(model="org/model", messages=MESSAGES)
            assert (bad.value.code, bad.value.param) == (code, "messages")

    run(use, script)


def test_api_keys_work_with_the_sdk() -> None:
    async def use(client: Client) -> None:
        async with sdk(client, "wrong") as api:
            with pytest.raises(openai.AuthenticationError):
                await api.models.list()
        async with sdk(client, "right") as api:
            assert (await api.models.list()).data

    run(use, config=ServerConfig(api_key=["right"]))
