"""A client that goes away makes room at once for a prompt that waits for its blocks."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import grpc
import pytest
from support.pipeline.grpc_client import address_of, stub_of
from support.pipeline.served import BUILT_IN, Served, served
from support.polling import until

from penstock.protocol.grpc import penstock_pb2 as pb

PROMPT_TOKENS, MAX_TOKENS = 1200, 800
FREED_SECONDS = 0.5
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """Whose blocks hold one of the prompts, but not two."""
    with served(*BUILT_IN, "--num-kv-blocks", "128", "--block-size", "16") as server:
        yield server


def prompt(step: int) -> list[int]:
    return [300 + step * at % 200 for at in range(PROMPT_TOKENS)]


class Client(Protocol):
    """One request that is under way."""

    def leave(self) -> None:
        """Close the connection, or cancel the call, with nothing else said."""


class GrpcClient:
    def __init__(self, server: Served, name: str, step: int) -> None:
        self._channel = grpc.insecure_channel(address_of(server))
        sampling = pb.Sampling(max_tokens=MAX_TOKENS, ignore_eos=True, seed=1)
        asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt(step)), sampling=sampling)
        self._stream: Any = stub_of(self._channel).Generate(
            asked, metadata=[("x-request-id", name)]
        )

    def leave(self) -> None:
        self._stream.cancel()
        self._channel.close()


class HttpClient:
    def __init__(self, server: Served, name: str, step: int, *, stream: bool) -> None:
        self._connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
        body = {
            "prompt": prompt(step), "max_tokens": MAX_TOKENS, "ignore_eos": True, "seed": 1,
            "stream": stream,
        }  # fmt: skip
        headers = {"Content-Type": "application/json", "x-request-id": name}
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)

    def leave(self) -> None:
        assert self._connection.sock is not None
        self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def streamed(server: Served, name: str, step: int) -> HttpClient:
    return HttpClient(server, name, step, stream=True)


def whole(server: Served, name: str, step: int) -> HttpClient:
    return HttpClient(server, name, step, stream=False)


def until_told(server: Served, name: str, holds: Callable[[dict[str, Any]], Any]) -> None:
    """Returns when that holds of what the server tells of the request."""

    def is_told() -> bool:
        with (
            contextlib.suppress(urllib.error.HTTPError),  # it has not come yet
            urllib.request.urlopen(f"{server.url}/v1/requests/{name}", timeout=10) as answer,
        ):
            return bool(holds(json.load(answer)))
        return False

    until(is_told, told=name)


def has_begun(life: dict[str, Any]) -> bool:
    return any(one["state"] == "running" for one in life["states"])


@pytest.mark.parametrize("connect", [GrpcClient, streamed, whole], ids=["grpc", "http", "whole"])
def test_a_client_that_goes_away_makes_room_for_a_prompt_that_waits_for_its_blocks(
    server: Served, connect: Callable[[Served, str, int], Client], request: pytest.FixtureRequest
) -> None:
    """Within 500 ms; it prints how soon that is seen from outside."""
    kind = request.node.callspec.id
    first = connect(server, f"first-{kind}", 7)
    until_told(server, f"first-{kind}", lambda life: life["state"] == "first_token")
    second = connect(server, f"second-{kind}", 11)
    until_told(server, f"second-{kind}", lambda life: life["waits_for"] == "slot")
    left = time.monotonic()
    first.leave()
    until_told(server, f"second-{kind}", has_begun)
    seconds = time.monotonic() - left
    second.leave()
    print(f"it has begun {1000 * seconds:.0f} ms after the first has left")
    assert seconds <= FREED_SECONDS
    assert server.settled()["penstock_kv_blocks_used"] == 0
