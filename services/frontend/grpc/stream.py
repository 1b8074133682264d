"""An answer as messages of a call.

What comes of an answer is gathered; the call's task takes all of it, writes one message, and waits
until gRPC has taken that. So tokens that arrive together leave together, and a client that reads
slowly gets fewer, larger messages. One that does not read is given up once ``backlog_limit`` bytes
wait behind the message that is being written, or when nothing was taken of it for ``stall_s``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from google.protobuf.message import Message

from penstock.client.answers import Answer
from penstock.client.meters import Usage
from penstock.client.sink import RowExtras
from penstock.protocol.trace_context import line_fields
from penstock.services.frontend.backlog import backlog_limit, prompt_bytes, rendered_bytes
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.generation import Generation
from penstock.services.frontend.grpc.sending import slow_reader

TEXT_BYTES = 16
"""About what a row of text takes in a message beside the text."""
_log = logging.getLogger("penstock.frontend")


class MakesMessages(Protocol):
    def messages(
        self, answers: Iterable[tuple[int, Answer]], usage: Usage, *, ended: bool
    ) -> Sequence[Message]:
        """What has come of some choices since the last time, by their numbers. ended: it is the
        last of all."""


class GatheredAnswer(Answer):
    """The answer of one choice, until the stream takes it."""

    __slots__ = ("_stream", "index")

    def __init__(self, stream: MessageStream, index: int) -> None:
        super().__init__()
        self._stream = stream
        self.index = index

    def add_text(self, text: str) -> None:
        self.content.append(text)
        self._stream.gathered(self, len(text) + TEXT_BYTES)

    def add(self, text: str, extras: RowExtras) -> None:
        super().add(text, extras)
        if extras.details is not None or extras.prompt is not None:
            self._stream.expect(prompt_bytes(extras))
        self._stream.gathered(self, rendered_bytes(text, extras))


class MessageStream:
    """The messages of one answer."""

    def __init__(
        self,
        generation: Generation,
        messages: MakesMessages,
        write: Callable[[bytes], Awaitable[None]],
        *,
        stall_s: float,
    ) -> None:
        """write: returns when gRPC has taken the message."""
        self._generation = generation
        self._messages = messages
        self._write = write
        self._stall_s = stall_s
        caller = generation.caller
        self._log_fields = line_fields(caller.request_id, caller.trace)
        request = generation.request
        self._is_whole = not request.stream
        """One message, when all is there."""
        self._limit = backlog_limit(generation.open_choices, request.params.logprobs)
        self._gathered: dict[GatheredAnswer, None] = {}
        self._bytes = 0
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._task = asyncio.current_task()
        self._writing_since = 0.0
        """0 while no message is being written."""
        self._timer: asyncio.TimerHandle
        self._cut: ApiError | None = None
        """Why the reader was given up."""

    def answers(self) -> list[GatheredAnswer]:
        """The answer of each choice, over all prompts."""
        return [GatheredAnswer(self, index) for index in range(self._generation.open_choices)]

    def expect(self, size: int) -> None:
        """A row of so many bytes comes once: they are no sign of a slow reader."""
        self._limit += size

    def gathered(self, answer: GatheredAnswer, size: int) -> None:
        """The answer has grown by about so many bytes."""
        self._gathered[answer] = None
        self._bytes += size
        if self._waiter is not None:
            self._wake()
        elif self._bytes > self._limit and self._writing_since:
            self._give_up(f"{self._bytes} bytes wait for it; {self._limit} may")

    async def run(self) -> None:
        """Write all messages of an answer that was opened. Raises ``ApiError``."""
        generation = self._generation
        await generation.accepted
        if generation.error is not None:
            raise generation.error
        generation.finished.add_done_callback(lambda _: self._wake())
        self._timer = self._loop.call_later(self._stall_s, self._look)
        try:
            told_all = False
            while not told_all:
                if not generation.finished.done() and (self._is_whole or not self._gathered):
                    await self._more()
                    continue
                told_all = generation.finished.done()
                ended = told_all and generation.error is None
                if ended or self._gathered:
                    await self._send(ended=ended)
        finally:
            self._timer.cancel()
        if generation.error is not None:
            raise generation.error

    async def _more(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if (
            self._waiter is not None
            and not self._waiter.done()
            and (not self._is_whole or self._generation.finished.done())
        ):
            self._waiter.set_result(None)

    async def _send(self, *, ended: bool) -> None:
        taken, self._gathered = self._gathered, {}
        self._bytes = 0
        usage = self._generation.usage
        messages = self._messages.messages([(one.index, one) for one in taken], usage, ended=ended)
        for answer in taken:
            answer.clear()
        try:
            for message in messages:
                self._writing_since = self._loop.time()
                await self._write(message.SerializeToString())
        except asyncio.CancelledError:
            if self._cut is None:
                raise
            raise self._cut from None
        finally:
            self._writing_since = 0.0

    # --- readers that do not read

    def _look(self) -> None:
        since = self._writing_since
        waited = self._loop.time() - since if since else 0.0
        if waited >= self._stall_s:
            self._give_up(f"it took nothing for {self._stall_s:g} s; {self._bytes} bytes wait")
        else:
            self._timer = self._loop.call_later(self._stall_s - waited, self._look)

    def _give_up(self, reason: str) -> None:
        if self._cut is not None or self._task is None:
            return
        _log.warning("a reader is cut off: %s", reason, extra=self._log_fields)
        self._cut = slow_reader(reason)
        self._generation.fail(self._cut)
        self._task.cancel()
