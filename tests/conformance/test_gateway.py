"""A public gateway (SMG) in front of a server: it has the tokenizer, and sends and gets tokens.

`make conformance` installs it among the clients.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.pipeline.served import Served, served
from support.polling import until

ROOT = Path(__file__).resolve().parents[2]
GATEWAY = ROOT / "build/clients/bin/smg"
SECONDS = 60.0
STORY = {"model": "penstock-demo", "prompt": "Tell me a story", "temperature": 0, "max_tokens": 40}
CHAT = {
    "model": "penstock-demo",
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "temperature": 0,
    "max_tokens": 60,
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not GATEWAY.exists(), reason="`make conformance` installs the gateway"),
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def post(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("--device", "cpu", "--dtype", "float32", "--grpc-port", "0") as server:
        yield server


def answers(url: str) -> bool:
    with contextlib.suppress(urllib.error.URLError, ConnectionError):
        return bool(post(f"{url}/v1/completions", {**STORY, "max_tokens": 1}))
    return False


@pytest.fixture(scope="module")
def gateway(server: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address, once it has fetched the tokenizer."""
    worker = server.find(r'"grpc": "([^"]+)"')
    url = f"http://127.0.0.1:{free_port()}"
    log = tmp_path_factory.mktemp("gateway") / "log"
    command = [
        *(str(GATEWAY), "launch", "--worker-urls", f"grpc://{worker}", "--host", "127.0.0.1"),
        *("--port", url.rpartition(":")[2], "--prometheus-port", str(free_port())),
    ]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            until(lambda: answers(url), SECONDS, told=lambda: log.read_text()[-4000:])
            yield url
        finally:
            process.terminate()


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", STORY), ("/v1/chat/completions", CHAT)]
)
def test_what_comes_through_the_gateway_is_what_the_server_says(
    path: str, body: dict[str, Any], server: Served, gateway: str
) -> None:
    mine, through = post(server.url + path, body), post(gateway + path, body)
    (own,), (other,) = mine["choices"], through["choices"]
    if "message" in own:
        assert other["message"]["content"] == own["message"]["content"]
    else:
        assert other["text"] == own["text"]
    assert other["finish_reason"] == own["finish_reason"]
    for name in ("prompt_tokens", "completion_tokens"):
        assert through["usage"][name] == mine["usage"][name]
    assert "VllmEngine/Generate" in server.output


def test_a_stream_through_the_gateway_is_whole(server: Served, gateway: str) -> None:
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    headers = {"Content-Type": "application/json"}
    path = "/v1/chat/completions"
    request = urllib.request.Request(gateway + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = [line.removeprefix(b"data: ") for line in answer if line.startswith(b"data: {")]
    chunks = list(map(json.loads, lines))
    text = "".join(
        one["delta"].get("content") or "" for chunk in chunks for one in chunk["choices"]
    )
    mine = post(server.url + path, CHAT)
    assert text == mine["choices"][0]["message"]["content"]
    usage = next(chunk["usage"] for chunk in chunks if chunk.get("usage"))
    assert usage["completion_tokens"] == mine["usage"]["completion_tokens"]
