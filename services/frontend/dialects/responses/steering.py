"""Steering: a user's messages for a response that runs already."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
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
"""That wait for one response to end, or for the results of its tools."""
MAX_STEER_BYTES = 4 * 1024 * 1024
"""Of all that wait on a connection: responses whose tools bring no results may be many."""
OVERHEAD_BYTES = 1024
"""What one takes beside its input."""


class Steer(msgspec.Struct, frozen=True):
    """One submission."""

    id: str
    target: str
    """The response that it steers."""
    items: list[InputItem]
    raw: bytes
    """As the client wrote it, for its return."""

    @property
    def size(self) -> int:
        """Bytes that it takes while it waits, about."""
        return len(self.raw) + OVERHEAD_BYTES

    def named(self) -> dict[str, str]:
        return {"id": self.id, "previous_response_id": self.target}


class Steerable(Protocol):
    """A response that runs, and those that steering makes of it."""

    @property
    def steers(self) -> Sequence[Steer]:
        """What waits for it to end."""

    @property
    def lane(self) -> str | None:
        """The lane that its events name."""

    def steer(self, body: list[InputItem], raw: bytes) -> None:
        """Take messages."""


class Steering:
    """What a connection knows of it."""

    def __init__(self) -> None:
        self.running: dict[str, Steerable] = {}
        """Responses by their ids."""
        self.pending: dict[str, list[Steer]] = {}
        """What waits for the results of tools, by the response that has called them."""
        self.turns: set[Steerable] = set()
        """All that may have something waiting."""

    @property
    def size(self) -> int:
        """Bytes of all that waits."""
        waiting = [*self.pending.values(), *(turn.steers for turn in self.turns)]
        return sum(steer.size for steers in waiting for steer in steers)

    def refusal(self, steered: Steerable, size: int) -> tuple[str, str] | None:
        """Code and message of why an input of so many bytes cannot wait; ``None``: it can."""
        if len(steered.steers) >= MAX_STEERS:
            message = f"{MAX_STEERS} steering inputs wait already, which is the limit"
            return "too_many_pending_steers", message
        there = self.size
        if there + size + OVERHEAD_BYTES <= MAX_STEER_BYTES:
            return None
        return (
            "pending_steers_too_large",
            f"this steering input has {size} bytes, and {there} wait on this connection already; "
            f"together they may be {MAX_STEER_BYTES - OVERHEAD_BYTES}: send a shorter one, or send "
            "the results of tools that others wait for first",
        )


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
