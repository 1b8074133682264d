"""Whatever API a conversation comes through, it has the same answer and the same usage."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from conversation_apis import Answer, Api, ChatCompletions, Messages, OllamaChat, Responses
from conversation_grpc import Grpc
from conversation_library import Library
from conversation_sockets import ResponsesWebSocket, Stream
from conversations import CONVERSATIONS
from grpc_client import address_of
from served import Served, served

from penstock import LLM

pytestmark = pytest.mark.slow

OTHERS: list[Api] = [Responses(), ResponsesWebSocket(), Messages(), OllamaChat(), Stream()]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    # Texts of two requests are the same bit for bit only in float32.
    with served("--device", "cpu", "--dtype", "float32", "--grpc-port", "0") as server:
        yield server


@pytest.fixture(scope="module")
def expected(server: Served) -> list[Answer]:
    """The answers of chat completions."""
    return asyncio.run(ChatCompletions().ask(server.url, CONVERSATIONS))


def test_the_conversations_are_of_many_kinds(expected: list[Answer]) -> None:
    assert len({conversation.name for conversation in CONVERSATIONS}) == 30
    assert len({answer.text + answer.thought for answer in expected}) > 15
    assert {answer.finish for answer in expected} == {"stop", "length", "tool_calls"}
    assert sum(bool(answer.thought) for answer in expected) > 5
    assert sum(bool(answer.calls) for answer in expected) > 3


@pytest.mark.parametrize("api", OTHERS, ids=lambda api: api.name)
def test_another_api_gives_the_same_answers_and_usage(
    api: Api, server: Served, expected: list[Answer]
) -> None:
    found = asyncio.run(api.ask(server.url, CONVERSATIONS))
    differences = {
        conversation.name: {"has": answer, "chat completions": api.told(wanted)}
        for conversation, answer, wanted in zip(CONVERSATIONS, found, expected, strict=True)
        if answer != api.told(wanted)
    }
    assert differences.keys() == api.cannot.keys(), differences


def test_grpc_gives_the_same_answers_and_usage(server: Served, expected: list[Answer]) -> None:
    found = Grpc().ask(address_of(server), CONVERSATIONS)
    differences = [pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1]]
    assert differences == []


@pytest.mark.parametrize("role", ["worker", "scheduler", "tokenizer", "router"])
def test_grpc_gives_them_while_a_process_is_killed(
    role: str, server: Served, expected: list[Answer]
) -> None:

    def counted() -> float:
        return server.metrics().get("penstock_grpc_requests_total", 0.0)

    done = counted()
    victims = [one for one in server.processes().values() if server.role_of(one) == role]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(Grpc().ask, address_of(server), CONVERSATIONS)
        while counted() < done + 5:
            assert not asked.done()
        for victim in victims:
            victim.kill()
        found = asked.result(90)
    differences = [pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1]]
    assert differences == []


def test_the_library_gives_the_same_answers_and_usage(expected: list[Answer]) -> None:
    with LLM(device="cpu", dtype="float32", threads=1) as llm:
        found = Library().ask(llm, CONVERSATIONS)
    wanted = [answer._replace(thought_tokens=None) for answer in expected]
    differences = [pair for pair in zip(found, wanted, strict=True) if pair[0] != pair[1]]
    assert differences == []
