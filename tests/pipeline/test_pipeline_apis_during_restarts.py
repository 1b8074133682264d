"""What comes by any API while the only engine is started again waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import aiohttp
import grpc
import pytest
from support.pipeline.grpc_client import address_of, gathered, stub_of
from support.pipeline.restarted_engine import LATE, MODEL, all_wait
from support.pipeline.served import Served, served

from penstock.protocol.grpc import penstock_pb2 as pb

CHAT = [{"role": "user", "content": "hi"}]
GENERATING = [
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2}),
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
    ("/v1/responses/input_tokens", {"input": "hi"}),
    ("/v1/messages", {"messages": CHAT, "max_tokens": 2}),
    ("/v1/messages/count_tokens", {"messages": CHAT}),
    ("/api/chat", {"messages": CHAT, "stream": False, "options": {"num_predict": 2}}),
    ("/api/generate", {"prompt": "hi", "stream": False, "options": {"num_predict": 2}}),
    ("/api/show", {}),
    ("/api/v1/generate", {"prompt": "hi", "max_length": 2}),
    ("/tokenize", {"prompt": "hi"}),
    ("/detokenize", {"tokens": [5, 6]}),
]
VECTORS = [("/v1/embeddings", {"input": ["a", "b"]})]


def models(server: Served) -> str:
    """What is told of the models and their limits."""
    with urllib.request.urlopen(server.url + "/v1/models", timeout=10) as answer:
        return str(answer.read().decode())


async def on_stream(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/v1/stream") as socket:
        body = {"prompt": [5, 6, 7], "max_tokens": 2}
        await socket.send_json({"id": "a", "type": "completion", "body": body})
        while (frame := await socket.receive_json())["type"] not in ("end", "error"):
            pass
        return str(frame["type"])


async def on_responses(url: str) -> str:
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"{url}/v1/responses") as socket,
    ):
        body = {"model": MODEL, "input": "hi", "max_output_tokens": 2}
        await socket.send_json({"type": "response.create", **body})
        ends = ("response.completed", "response.incomplete", "error")
        while (event := await socket.receive_json())["type"] not in ends:
            pass
        return str(event["type"])


def by_grpc(address: str) -> str:
    with grpc.insecure_channel(address) as channel:
        sampling = pb.Sampling(max_tokens=2, ignore_eos=True)
        asked = pb.GenerateRequest(text="hi", sampling=sampling)
        return gathered(stub_of(channel).Generate(asked)).finishes[0]


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[Served]:
    with served("--device", "null", "--served-model-name", MODEL, *LATE, *flags) as one:
        yield one


def test_every_api_that_generates_waits_for_the_engine() -> None:
    """Meanwhile the scheduler does not know the model's limits: nothing is judged by them."""
    with serving("--grpc-port", "0") as server:
        told = models(server)
        assert json.loads(told)["data"][0]["max_model_len"] > 0
        others = (
            models,
            lambda server: asyncio.run(on_stream(server.url)),
            lambda server: asyncio.run(on_responses(server.url)),
            lambda server: by_grpc(address_of(server)),
        )
        answers, said = all_wait(server, GENERATING, others)
        assert said == [told, "end", "response.incomplete", "LENGTH"]
        assert answers["/v1/completions"]["usage"]["completion_tokens"] == 2
        assert models(server) == told


@pytest.mark.slow  # in every run: ``test_pipeline_scores``
def test_requests_for_vectors_wait_for_the_engine() -> None:
    with serving("--task", "embed") as server:
        all_wait(server, VECTORS)
