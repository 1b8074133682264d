"""Questions that a frontend asks other processes, and the answers to them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable

from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.administration import Ask, Told

ANSWER_SECONDS = 1.0


class PeerQuestions:
    """One of a process; its answers come through ``told``."""

    def __init__(self, address: str, send: Callable[[str, Message], object]) -> None:
        self._address = address
        self._send = send
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}

    async def ask(self, addresses: Iterable[str], what: str, about: bytes) -> list[bytes]:
        """The answers of those who have one within ``ANSWER_SECONDS``, without the empty ones."""
        loop = asyncio.get_running_loop()
        asked: dict[int, asyncio.Future[bytes]] = {}
        for address in addresses:
            number = next(self._numbers)
            asked[number] = self._waiting[number] = loop.create_future()
            self._send(address, Ask(self._address, number, what, about))
        try:
            if asked:
                await asyncio.wait(asked.values(), timeout=ANSWER_SECONDS)
            done = [one for one in asked.values() if one.done()]
            return [found for one in done if (found := one.result())]
        finally:
            for number in asked:
                del self._waiting[number]

    def told(self, message: Told) -> None:
        """An answer has come; one that nobody waits for any more is dropped."""
        waiting = self._waiting.get(message.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(message.answer)
