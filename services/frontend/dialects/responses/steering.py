"""Steering: a user's messages for a response that runs already."""

from __future__ import annotations

import uuid
from typing import Any, Protocol

import msgspec

from penstock.services.frontend.bodies.openai_items import (
    CustomOutputItem,
    FunctionOutputItem,
    InputItem,
    MessageItem,
)
from penstock.services.frontend.bodies.openai_response import CustomCall, FunctionCall
from penstock.services.frontend.bodies.openai_responses import ResponseSteer
from penstock.services.frontend.dialects.responses.events import EventWriter

MAX_STEERS = 16
"""That wait for one response to end."""


class Steer(msgspec.Struct, frozen=True):
    """One submission."""

    id: str
    target: str
    """The response that it steers."""
    items: list[InputItem]
    raw: bytes
    """As the client wrote it, for its return."""

    def named(self) -> dict[str, str]:
        return {"id": self.id, "previous_response_id": self.target}


class Steerable(Protocol):
    """A response that runs."""

    def steer(self, body: list[InputItem], raw: bytes) -> None:
        """Take messages, or say why not."""


class Steering:
    """What a connection knows of it."""

    def __init__(self) -> None:
        self.running: dict[str, Steerable] = {}
        """Responses by their ids."""
        self.pending: dict[str, list[Steer]] = {}
        """What waits for the results of tools, by the response that has called them."""


def steer_of(body: ResponseSteer) -> list[InputItem]:
    """The messages of a submission."""
    if isinstance(body.input, str):
        return [MessageItem(role="user", content=body.input)]
    return [MessageItem(role="user", content=one.content) for one in body.input]


def new_steer(target: str, items: list[InputItem], raw: bytes) -> Steer:
    return Steer(f"steer_{uuid.uuid4().hex}", target, items, raw)


def accepted(writer: EventWriter, steer: Steer) -> bytes:
    return writer.event("response.steer.accepted", steer=steer.named())


def pending(writer: EventWriter, steer: Steer, calls: list[FunctionCall | CustomCall]) -> bytes:
    """The response has called tools: their results come first."""
    return writer.event(
        "response.steer.pending",
        reason="waiting_for_required_input",
        required_input=list(map(_wanted, calls)),
        steer=steer.named(),
    )


def _wanted(call: FunctionCall | CustomCall) -> dict[str, str]:
    if isinstance(call, CustomCall):
        return {"type": "custom_tool_call_output", "call_id": call.call_id}
    return {"type": "function_call_output", "call_id": call.call_id, "name": call.name}


def failed_steer(
    raw: bytes,
    code: str,
    message: str,
    *,
    writer: EventWriter | None = None,
    steer: Steer | None = None,
) -> bytes:
    """A submission that comes to nothing, with its input. ``steer``: if it was accepted before."""
    given: Any = msgspec.json.decode(raw)
    returned = {
        "input": given.get("input", ""),
        "previous_response_id": given.get("previous_response_id", ""),
    }
    if steer is not None:
        returned["id"] = steer.id
    writer = writer or EventWriter(is_socket=True)
    error = {"type": "invalid_request_error", "code": code, "message": message}
    return writer.event("response.steer.failed", error=error, steer=returned)


def joined(own: list[InputItem], steers: list[Steer]) -> list[InputItem]:
    """An input with what has waited for it: behind the results of tools, which must follow their
    calls in every chat template."""
    results = 0
    while results < len(own) and isinstance(own[results], FunctionOutputItem | CustomOutputItem):
        results += 1
    steered = [item for steer in steers for item in steer.items]
    return [*own[:results], *steered, *own[results:]]
