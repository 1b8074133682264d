"""What a ledger needs around it: members that are all there, and a place for what it sends."""

from __future__ import annotations

from array import array
from typing import Any

from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.membership import Capacity, Identity, Peer, Phase
from penstock.protocol.wire.messages.requests import first_attempt

FRONTEND, TOKENIZER, OTHER, SCHEDULER = 1, 2, 3, 4
ROUTER = "ipc:///router"
PROMPT = array("i", [5, 6]).tobytes()
ONE = first_attempt(1)


def address(incarnation: int) -> str:
    return f"ipc:///{incarnation}"


class Members:
    """Everybody is there."""

    router_address = ROUTER
    router_incarnation = 9

    def __init__(self) -> None:
        services = {
            FRONTEND: "frontend", TOKENIZER: "tokenizer", OTHER: "tokenizer", SCHEDULER: "scheduler"
        }  # fmt: skip
        self.peers = {
            number: Peer(
                service, address(number), number, Identity(1, "x"), Phase.READY, "", Capacity(), 0
            )
            for number, service in services.items()
        }


class Sent:
    """What a ledger has sent since the test last looked."""

    def __init__(self) -> None:
        self._messages: list[tuple[str, Message]] = []

    def __call__(self, to: str, message: Message) -> bool:
        self._messages.append((to, message))
        return True

    def take(self, kind: type | None = None) -> list[tuple[str, Any]]:
        """All of them, or those of one kind; the rest is forgotten."""
        found, self._messages = self._messages, []
        return [(to, m) for to, m in found if kind is None or isinstance(m, kind)]
