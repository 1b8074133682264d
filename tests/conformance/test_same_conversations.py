"""Whatever API a conversation comes through, it has the same answer and the same usage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from support.conformance.conversation_apis import (
    Answer,
    Api,
    ChatCompletions,
    Messages,
    OllamaChat,
    Responses,
)
from support.conformance.conversation_grpc import Grpc
from support.conformance.conversation_library import AsyncLibrary, Library
from support.conformance.conversation_sockets import ResponsesWebSocket, Stream
from support.conformance.conversations import CONVERSATIONS
from support.pipeline.grpc_client import address_of
from support.pipeline.served import Served, served

from penstock import LLM, AsyncLLM

pytestmark = pytest.mark.slow

OTHERS: list[Api] = [Responses(), ResponsesWebSocket(), Messages(), OllamaChat(), Stream()]

ROLES = ("worker", "scheduler", "tokenizer", "router")
FINISHED = "penstock_requests_finished_total"
OF_LIBRARY: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1}


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
    assert _differences(Grpc().ask(address_of(server), CONVERSATIONS), expected) == []


@pytest.mark.parametrize("role", ROLES)
def test_grpc_gives_them_while_a_process_is_killed(
    role: str, server: Served, expected: list[Answer]
) -> None:
    done = _counted(server, FINISHED)
    found = _asked_while_killed(
        lambda: Grpc().ask(address_of(server), CONVERSATIONS),
        lambda: _counted(server, FINISHED) >= done + 3,
        _processes(server.process.pid, role),
    )
    assert _differences(found, expected) == []


@pytest.mark.parametrize("role", [*ROLES, "frontend"])
def test_http_gives_them_while_a_process_is_killed(
    role: str, server: Served, expected: list[Answer]
) -> None:
    done = _counted(server, FINISHED)
    found = _asked_while_killed(
        lambda: asyncio.run(ChatCompletions().ask(server.url, CONVERSATIONS)),
        lambda: _counted(server, FINISHED) >= done + 3,
        _processes(server.process.pid, role),
    )
    assert _differences(found, expected) == []


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**OF_LIBRARY) as llm:
        yield llm


@pytest.mark.parametrize("role", ["", *ROLES])
def test_the_library_gives_the_same_answers_and_usage(
    role: str, llm: LLM, expected: list[Answer]
) -> None:
    """role: of the process that is killed meanwhile."""
    found = _asked_while_killed(
        lambda: Library().ask(llm, CONVERSATIONS),
        lambda: len(llm._client.ledger.open) > 0,
        _processes(llm._server.process.pid, role),
    )
    assert _differences(found, _told_by_library(expected)) == []


def test_the_asynchronous_library_gives_them_while_processes_are_killed(
    expected: list[Answer],
) -> None:
    async def asked(llm: AsyncLLM, role: str) -> list[Answer]:
        asking = asyncio.create_task(AsyncLibrary().ask(llm, CONVERSATIONS))
        processes = llm._processes
        while processes.client is None or not processes.client.ledger.open:
            await asyncio.sleep(0.01)
        assert processes.server is not None
        for victim in _processes(processes.server.process.pid, role):
            victim.kill()
        return await asking

    async def main() -> None:
        async with AsyncLLM(**OF_LIBRARY) as llm:
            for role in ("", *ROLES):
                found = await asked(llm, role)
                assert (role, _differences(found, _told_by_library(expected))) == (role, [])

    asyncio.run(main())


def _told_by_library(expected: list[Answer]) -> list[Answer]:
    return [answer._replace(thought_tokens=None) for answer in expected]


def _differences(found: list[Answer], wanted: list[Answer]) -> list[tuple[Answer, Answer]]:
    return [pair for pair in zip(found, wanted, strict=True) if pair[0] != pair[1]]


def _counted(server: Served, name: str) -> float:
    try:
        return server.metrics().get(name, 0.0)
    except OSError:  # no frontend just now
        return 0.0


def _processes(root: int, role: str) -> list[psutil.Process]:
    """Of the launcher with this process id; role: empty, none."""
    found = psutil.Process(root).children(recursive=True) if role else []
    return [process for process in found if role in " ".join(process.cmdline())]


def _asked_while_killed(
    ask: Callable[[], list[Answer]], begun: Callable[[], bool], victims: Sequence[psutil.Process]
) -> list[Answer]:
    """What is asked in a thread; the victims are killed once it has ``begun``."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        while not begun():
            assert not asked.done()
            time.sleep(0.01)
        for victim in victims:
            victim.kill()
        return asked.result(300)
