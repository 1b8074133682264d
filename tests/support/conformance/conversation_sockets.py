"""The APIs that carry all conversations at once on one WebSocket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import aiohttp
from support.conformance.conversation_apis import (
    MODEL,
    Answer,
    Api,
    ChatCompletions,
    Responses,
    chat_usage,
    decoded,
)
from support.conformance.conversations import Conversation


class ResponsesWebSocket(Responses):
    """All conversations at once, a lane for each."""

    name = "Responses WebSocket"

    async def ask(self, url: str, conversations: Sequence[Conversation]) -> list[Answer]:
        found: dict[str, Answer] = {}
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(url + self.path, max_msg_size=0) as socket,
        ):
            for lane, conversation in enumerate(conversations):
                asked = {"model": MODEL, "stream_id": str(lane), **self.body(conversation)}
                await socket.send_json({"type": "response.create", **asked})
            while len(found) < len(conversations):
                event = await socket.receive_json()
                assert event["type"] != "error", event
                if event["type"] in ("response.completed", "response.incomplete"):
                    found[event["stream_id"]] = self.answer(event["response"])
        return [found[str(lane)] for lane in range(len(conversations))]


class Stream(Api):
    """Several requests at once, all frames as JSON."""

    name = "/v1/stream"
    untold = ()

    async def ask(self, url: str, conversations: Sequence[Conversation]) -> list[Answer]:
        frames: list[list[Any]] = [[] for _ in conversations]
        running = len(conversations)
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{url}/v1/stream", max_msg_size=0) as socket,
        ):
            for number, conversation in enumerate(conversations):
                body = {"model": MODEL, **ChatCompletions().body(conversation)}
                await socket.send_json({"id": str(number), "type": "chat", "body": body})
            while running:
                frame = await socket.receive_json()
                assert frame["type"] != "error", frame
                frames[int(frame["id"])].append(frame)
                running -= frame["type"] == "end"
        return list(map(self._answer, frames))

    def _answer(self, frames: list[Any]) -> Answer:
        *deltas, end = frames
        (choice,) = end["choices"]
        calls = [delta for delta in deltas if delta["type"] == "tool_call"]
        return Answer(
            _joined(deltas, type="text"),
            _joined(deltas, type="reasoning"),
            [
                (call["name"], decoded(_joined(deltas, type="arguments", index=call["index"])))
                for call in calls
            ],
            choice["finish_reason"],
            *chat_usage(end["usage"]),
            [
                token
                for name in ("prompt_token_ids", "token_ids")
                for delta in deltas
                for token in delta.get(name, ())
            ],
        )


def _joined(deltas: list[Any], **wanted: Any) -> str:
    """The texts of the deltas that have all these members."""
    return "".join(delta["text"] for delta in deltas if wanted.items() <= delta.items())
