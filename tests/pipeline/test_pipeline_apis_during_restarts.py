"""What comes by any API while the only engine is started again waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import grpc
import pytest
from grpc_client import address_of, gathered, stub_of
from served import Served, served

from penstock.protocol.grpc import penstock_pb2 as pb

DEMO = Path(__file__).resolve().parents[2] / "demo/model"
ATTACH_SECONDS = 2.0
Others: TypeAlias = Callable[[Served], str]
MODEL = "waited-for"
CHAT = [{"role": "user", "content": "hi"}]
GENERATING = [
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2}),
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 2}),
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
SCORES = [
    ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
    ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ("/v1/classify", {"input": "a"}),
]


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


def posted(server: Served, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    return server.post(path, {"model": MODEL, **body})


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


def classifier(folder: Path) -> str:
    """A copy of the built-in model that scores."""
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Qwen3ForSequenceClassification"]
    config["id2label"] = {"0": "relevant"}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[Served]:
    """Its second scheduler has to wait for its worker."""
    fault = f"worker:delay={ATTACH_SECONDS}@Attach=2"
    with served("--device", "null", "--served-model-name", MODEL, "--fault", fault, *flags) as one:
        yield one


def all_wait(
    server: Served, requests: list[tuple[str, dict[str, Any]]], others: Sequence[Others] = ()
) -> list[str]:
    """Ask everything while the engine is away. Returns what others have said."""
    for path, body in requests:
        assert posted(server, path, body)[0] == 200, path
    without_engine(server)
    with ThreadPoolExecutor(20) as threads:
        asked = {path: threads.submit(posted, server, path, body) for path, body in requests}
        said = [threads.submit(other, server) for other in others]
        assert not is_ready(server)
        found = {path: one.result(60) for path, one in asked.items()}
        assert {path: status for path, (status, _) in found.items()} == dict.fromkeys(found, 200)
        return [one.result(60) for one in said]


def test_every_api_that_generates_waits_for_the_engine() -> None:
    with serving("--grpc-port", "0") as server:
        others = (
            lambda server: asyncio.run(on_stream(server.url)),
            lambda server: asyncio.run(on_responses(server.url)),
            lambda server: by_grpc(address_of(server)),
        )
        ends = all_wait(server, GENERATING, others)
        assert ends == ["end", "response.incomplete", "LENGTH"]


@pytest.mark.parametrize("kind", [pytest.param("vectors", marks=pytest.mark.slow), "scores"])
def test_requests_for_what_a_model_makes_of_a_prompt_wait_for_the_engine(
    kind: str, tmp_path: Path
) -> None:
    flags = ("--task", "embed") if kind == "vectors" else (classifier(tmp_path / "ranker"),)
    with serving(*flags) as server:
        all_wait(server, VECTORS if kind == "vectors" else SCORES)
