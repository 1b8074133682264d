"""What a request reads of the store, within the limits of bodies, since it is input as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from penstock.services.frontend.body import Pause
from penstock.services.frontend.context import Context
from penstock.services.frontend.dialects.responses.store import StoredResponse
from penstock.services.frontend.errors import bad_request
from penstock.services.frontend.request_body import beside

Found = TypeVar("Found")


class HeldResponses:
    """Stored responses of one request, held against the budget of bodies."""

    def __init__(self, context: Context) -> None:
        self.size = 0
        """Bytes."""
        self._context = context

    def take(self, kept: StoredResponse) -> None:
        """Hold one more. Raises ``ApiError``: 503 where there is no room for it now, 400 where
        there never is."""
        size, bodies = kept.size(), self._context.bodies
        if self.size + size > bodies.limit:
            raise bad_request(
                f"previous_response_id: the stored responses have more than {bodies.limit} bytes, "
                "which all bodies may have together; send the conversation as input",
                "previous_response_id",
            )
        bodies.take(size)
        self.size += size

    async def read(self, read: Callable[[Pause | None], Found]) -> Found:
        """What ``read`` makes of all of them; of many bytes it does so beside the event loop."""
        return await beside(self._context, self.size, read)

    def release(self) -> None:
        self._context.bodies.used -= self.size
        self.size = 0


@contextmanager
def held_responses(context: Context) -> Iterator[HeldResponses]:
    """None at first; those that were taken are held for the time of the block."""
    held = HeldResponses(context)
    try:
        yield held
    finally:
        held.release()
