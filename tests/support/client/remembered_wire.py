"""What a frontend's client sees of a server in its tests: what it sends, and how requests end."""

from __future__ import annotations

from penstock.client.sink import RowExtras
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.requests import Rejected


class Wire:
    """A mailbox that remembers what was sent."""

    incarnation = 1000
    address = "ipc:///run/own.sock"

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, to: str, message: Message) -> bool:
        self.sent.append(message)
        return True

    def forget(self, to: str) -> None: ...

    def reopen(self, to: str) -> None: ...

    def outbox_bytes(self, to: str = "") -> int:
        return 0


class LastError:
    """A sink that keeps the error."""

    wants_ids = False

    def __init__(self) -> None:
        self.rejected: Rejected | None = None

    def on_accepted(self, prompt_tokens: int) -> None: ...

    def on_row(
        self, choice: int, text: str, tokens: int, extras: RowExtras | None = None
    ) -> None: ...

    def on_continued(self) -> None: ...

    def on_rejected(self, rejected: Rejected) -> None:
        self.rejected = rejected
