"""What waits in an outbox is sent by the event loop, however soon that is due."""

from __future__ import annotations

from typing import Any

import pytest
import uvloop

from penstock.protocol.process.flusher import Flusher


class Waiting:
    """A mailbox whose outboxes are empty after so many tries."""

    def __init__(self, tries: int, retry_s: float) -> None:
        self.left, self._retry_s = tries, retry_s

    def flush(self) -> bool:
        self.left -= 1
        return self.left < 0

    def retry_s(self) -> float:
        return self._retry_s


@pytest.mark.parametrize("retry_s", [0.0, 0.0002, 0.004])
def test_what_is_due_at_once_is_planned_as_what_is_due_later(retry_s: float) -> None:
    loop, failures = uvloop.new_event_loop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: failures.append(context))
    mailbox: Any = Waiting(6, retry_s)
    flusher = Flusher(loop, mailbox)

    def begin() -> None:
        flusher.flush()
        flusher.flush()  # while the first is planned

    loop.call_soon(begin)
    loop.call_later(0.2, loop.stop)
    loop.run_forever()
    loop.close()
    assert not failures
    assert mailbox.left < 0
