"""A conversation that is continued counts as a body does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
from support.frontend.frontend_scripted import Client, run, say
from support.frontend.responses_client import Socket, connected

from penstock.protocol.wire.messages.requests import Chat
from penstock.services.frontend.context import CONTEXT
from penstock.services.frontend.request_body import LARGE_BODY_BYTES

PATH = "/v1/responses"
LONG = "x" * (LARGE_BODY_BYTES // 2)


async def conversation(client: Client, turns: int) -> str:
    """The last response of one whose turns are small bodies."""
    body: dict[str, Any] = {"input": LONG}
    for _ in range(turns):
        status, answer, _ = await client.post(PATH, body)
        assert status == 200, answer
        body["previous_response_id"] = answer["id"]
    return str(body["previous_response_id"])


class NotedThread(ThreadPoolExecutor):
    """Notes how often something is done beside the event loop."""

    noted = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.noted += 1
        return super().submit(fn, *args, **kwargs)


def test_a_long_conversation_is_read_beside_the_event_loop() -> None:
    async def use(client: Client) -> None:
        context = client.app[CONTEXT]
        context.large_bodies = thread = NotedThread(1)
        short = await conversation(client, 1)
        assert thread.noted == 0
        last = await conversation(client, 3)
        before = thread.noted
        status, _, _ = await client.post(PATH, {"input": "y", "previous_response_id": last})
        assert status == 200
        assert thread.noted == before + 2  # its items, and the prompt that they make
        reference = {"type": "item_reference", "id": short.replace("resp", "msg") + "_0"}
        status, answer, _ = await client.post(PATH, {"input": [reference] * 3})
        assert status == 200, answer
        status, listed, _ = await client.get(f"{PATH}/{last}/input_items")
        assert (status, len(listed["data"])) == (200, 5)
        assert thread.noted == before + 3
        assert context.bodies.used == 0

    gateway = run(use, say("Hi"))
    prompt = gateway.works[4].prompt
    assert isinstance(prompt, Chat)
    contents = [one["content"] for one in msgspec.json.decode(prompt.messages)]
    assert contents == [LONG, "Hi", LONG, "Hi", LONG, "Hi", "y"]


def test_a_conversation_takes_room_among_the_bodies_that_are_read() -> None:
    async def use(client: Client) -> None:
        last = await conversation(client, 2)
        bodies = client.app[CONTEXT].bodies
        body = {"input": "y", "previous_response_id": last}
        used = bodies.used = bodies.limit - len(LONG)
        for path in (PATH, f"{PATH}/input_tokens"):
            status, answer, response = await client.post(path, body)
            assert status == 503, answer
            assert "Retry-After" in response.headers
            assert bodies.used == used
        async with connected(client) as socket:
            assert (await refused(socket, body))["code"] == "overloaded_error"
        bodies.used -= used
        status, _, _ = await client.post(PATH, body)
        assert (status, bodies.used) == (200, 0)

    run(use, say("Hi"))


async def refused(socket: Socket, body: dict[str, Any]) -> dict[str, Any]:
    return await socket.error(**body)


def test_a_conversation_that_never_has_room_is_refused_for_good() -> None:
    async def use(client: Client) -> None:
        last = await conversation(client, 2)
        client.app[CONTEXT].bodies.limit = len(LONG)
        body = {"input": "y", "previous_response_id": last}
        status, answer, _ = await client.post(PATH, body)
        assert status == 400
        assert "send the conversation as input" in answer["error"]["message"]

    run(use, say("Hi"))
