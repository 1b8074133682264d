"""What comes by any API while the only engine is started again waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import aiohttp
import grpc
import pytest
from grpc_client import address_of, gathered, stub_of
from served import Served, served

from penstock.protocol.grpc import penstock_pb2 as pb

LATE = ("--fault", "worker:delay=2@Attach=2")
"""A second scheduler has to wait for its worker."""
Others: TypeAlias = Callable[[Served], str]
MODEL = "waited-for"
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


def is_ready(server: Served) -> bool:
    try:
        with urllib.request.urlopen(server.url + "/ready", timeout=10):
            return True
    except urllib.error.HTTPError:
        return False


def without_engine(server: Served) -> None:
    """Kill the scheduler, and return when everybody knows."""
    for process in server.processes().values():
        if server.role_of(process) == "scheduler":
            process.kill()
    while is_ready(server):
        time.sleep(0.01)


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


def all_wait(
    server: Served,
    requests: list[tuple[str, dict[str, Any]]],
    others: Sequence[Others] = (),
    model: str = MODEL,
) -> tuple[dict[str, Any], list[str]]:
    """Ask everything while the engine is away. Returns the answers by their paths, and what others
    have said."""

    def posted(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return server.post(path, {"model": model, **body})

    for path, body in requests:
        assert posted(path, body)[0] == 200, path
    without_engine(server)
    with ThreadPoolExecutor(20) as threads:
        asked = {path: threads.submit(posted, path, body) for path, body in requests}
        said = [threads.submit(other, server) for other in others]
        assert not is_ready(server)
        found = {path: one.result(60) for path, one in asked.items()}
        assert {path: status for path, (status, _) in found.items()} == dict.fromkeys(found, 200)
        answers = {path: answer for path, (_, answer) in found.items()}
        return answers, [one.result(60) for one in said]


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
