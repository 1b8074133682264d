"""Server-sent events: from rows of text to bytes on the client's connection.

A token's way is short: ``StreamedAnswer.add_text`` appends one frame (three byte strings joined),
and once in a turn of the event loop every stream with new frames is written in one piece, as one
HTTP chunk. No task wakes up and no object is built for a token.

aiohttp writes the headers and the end; between them the bytes go straight to the transport::

    response.prepare()  →  start()  …  flush() …  →  finish()  →  response.write_eof(tail)

A slow reader is noticed by the transport's backlog: above ``HOLD_BYTES`` the stream is *held*,
rows are gathered unrendered, by choice, and go out when the backlog is below
``RELEASE_BYTES``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from penstock.client.answers import Answer
from penstock.client.sink import RowExtras
from penstock.protocol.trace_context import line_fields
from penstock.services.frontend.backlog import Share, backlog_limit, prompt_bytes, rendered_bytes
from penstock.services.frontend.dialects.interface import ChoiceFrames, Renderer
from penstock.services.frontend.generation import Generation
from penstock.services.frontend.json_lines import one_line, to_json

HOLD_BYTES = 64 * 1024
RELEASE_BYTES = 16 * 1024
"""asyncio's low-water mark: below it the transport takes ``write_eof`` without waiting."""
STALL_S = 60.0
_POLL_S = 0.02
_MAX_TICK_S = 1.0

_log = logging.getLogger("penstock.frontend")


class StreamedAnswer(Answer):
    """The answer of one choice, which leaves it as frames; while its stream is held it gathers."""

    __slots__ = ("_frames", "_stream")

    def __init__(self, stream: EventStream, frames: ChoiceFrames) -> None:
        super().__init__()
        self._stream = stream
        self._frames = frames

    def add_text(self, text: str) -> None:
        stream = self._stream
        if not stream.direct:
            super().add_text(text)
            if stream.held:
                stream.hold(self, len(text.encode()))
            elif rendered := self.take():
                stream.write(rendered)
            return
        rendered = to_json(text)
        if not rendered.isascii():
            rendered = one_line(rendered)
        frames, pending = self._frames, stream.pending
        if not pending:
            stream.clock.mark(stream)
        pending.append(b"".join((frames.prefix, rendered, frames.suffix)))
        frames.prefix = frames.later

    def add(self, text: str, extras: RowExtras) -> None:
        super().add(text, extras)
        stream = self._stream
        if extras.details is not None or extras.prompt is not None:
            stream.expect(prompt_bytes(extras))
        if stream.held:
            stream.hold(self, rendered_bytes(text, extras))
        elif rendered := self.take():
            stream.write(rendered)

    def take(self) -> bytes:
        """The frames of what has come since the last ones; empty if nothing is to be said."""
        frames = self._frames.render(self)
        self.clear()
        return frames


class EventStream:
    """The events of one connection. Held until ``start``."""

    def __init__(
        self,
        generation: Generation,
        renderer: Renderer,
        clock: StreamClock,
        request_id: str = "",
    ) -> None:
        """request_id: for the log."""
        self.held = True
        self.direct = False
        """Plain text may be written as it comes: not held, and nothing in its frames changes."""
        request = generation.request
        self._all_direct = renderer.direct
        choices = len(request.prompts) * request.params.n
        self._limit = backlog_limit(choices, request.params.logprobs)
        self.log_fields = line_fields(request_id, generation.caller.trace)
        self._generation = generation
        self._renderer = renderer
        self.clock = clock
        self._transport: asyncio.Transport | None = None
        self._chunked = True
        self.pending: list[bytes] = []
        """Frames of this turn of the event loop. The clock is told of the first."""
        self._holding: dict[StreamedAnswer, None] = {}
        self._held_bytes = 0
        self._share = Share()
        """Of what waits on the transport: others may write to it too."""
        self._written_at = 0.0
        self._backlog = 0
        self._progress_at = 0.0
        self._drained: asyncio.Future[None] | None = None

    def answer(self, index: int) -> StreamedAnswer:
        """The answer of the choice with this index over all prompts."""
        return StreamedAnswer(self, self._renderer.choice(index, self._generation.usage))

    # --- rows in

    def write(self, frame: bytes) -> None:
        """Send a rendered frame at the end of this turn of the event loop."""
        if not self.pending:
            self.clock.mark(self)
        self.pending.append(frame)

    def expect(self, size: int) -> None:
        """A row of so many bytes comes once: they are no sign of a slow reader."""
        self._limit += size

    def hold(self, answer: StreamedAnswer, size: int) -> None:
        """The answer has grown by about so many bytes, which wait for the reader."""
        self._held_bytes += size
        self._holding[answer] = None
        transport = self._transport
        if transport is not None:
            total = self._held_bytes + self._share.of(transport.get_write_buffer_size())
            if total > self._limit:
                self.give_up(f"{total} bytes wait for it; {self._limit} may")

    # --- bytes out

    def start(
        self, transport: asyncio.Transport | None, *, chunked: bool, first: bytes = b""
    ) -> None:
        """The headers are out: send ``first`` and what was held. Raises
        ``ConnectionResetError``."""
        if transport is None or transport.is_closing():
            raise ConnectionResetError("The client closed the connection")
        self._transport = transport
        self._chunked = chunked
        self._written_at = self._progress_at = self.clock.now()
        self.clock.add(self)
        if first:
            self.expect(len(first))
            self.pending.append(first)
        self._release()

    def flush(self, now: float) -> None:
        """Write all pending frames as one HTTP chunk. Called by the clock."""
        transport, pending = self._transport, self.pending
        if transport is None or not pending:
            return
        if transport.is_closing():
            self._lost()
            return
        frames = b"".join(pending)
        pending.clear()
        if self._chunked:
            frames = b"%x\r\n%b\r\n" % (len(frames), frames)
        else:
            frames = self._framed(frames)
        transport.write(frames)
        self._written_at = now
        size, backlog = len(frames), transport.get_write_buffer_size()
        if backlog > size:
            self._share.add(size, backlog - size)
        else:
            self._share.most = size
        if backlog > HOLD_BYTES and not self.held:
            self._set_held(True)
            self._backlog = backlog
            self._progress_at = now
            self.clock.watch(self)

    def _framed(self, frames: bytes) -> bytes:
        """The bytes of some frames on a connection that is not chunked."""
        return frames

    def _set_held(self, held: bool) -> None:
        self.held = held
        self.direct = self._all_direct and not held

    def _release(self) -> None:
        self._set_held(False)
        holding, self._holding = self._holding, {}
        self._held_bytes = 0
        for answer in holding:
            if frames := answer.take():
                self.pending.append(frames)
        self.flush(self.clock.now())

    def tick(self, now: float, keep_alive_s: float) -> None:
        """Keep a silent connection alive. Called by the clock about every second."""
        transport = self._transport
        if transport is None:
            return
        if transport.is_closing():
            self._lost()
        elif not self.held and now - self._written_at >= keep_alive_s:
            self.keep_alive()

    def keep_alive(self) -> None:
        """What its API says while there is nothing else to say."""
        if said := self._renderer.keep_alive:
            self.write(said)

    def poll(self, now: float) -> bool:
        """Look after a slow reader; False: no longer needed. Called by the clock."""
        transport = self._transport
        if transport is None:
            return False
        if transport.is_closing():
            self._lost()
            return False
        backlog = transport.get_write_buffer_size()
        if backlog < self._backlog:
            self._progress_at = now
        self._backlog = backlog
        if backlog <= RELEASE_BYTES and self.held:
            self._release()
            self._backlog = transport.get_write_buffer_size()
        if self._drained is not None and self._backlog <= RELEASE_BYTES and not self.held:
            self._settle()
            return False
        if now - self._progress_at > self.clock.stall_s:
            waits = self._backlog + self._held_bytes
            self.give_up(f"it took nothing for {self.clock.stall_s:g} s; {waits} bytes wait")
            return False
        return self.held or self._drained is not None

    async def finish(self, end: Callable[[], bytes]) -> bytes:
        """Wait until the reader has nearly caught up; return what is left to write at the end.

        end: makes the last frames, when those of all rows are made.
        """
        transport = self._transport
        if transport is not None and (
            self.held or transport.get_write_buffer_size() > RELEASE_BYTES
        ):
            self._drained = asyncio.get_running_loop().create_future()
            self._progress_at = self.clock.now()
            self.clock.watch(self)
            await self._drained
        rest = b"".join(self.pending)
        self.pending.clear()
        return rest + end()

    def close(self) -> None:
        """Forget the connection: aiohttp writes to it from here on."""
        self.clock.discard(self)
        self._transport = None
        self.pending.clear()

    def _settle(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _lost(self) -> None:
        self.pending.clear()
        self._generation.abandon()
        self._settle()

    def give_up(self, reason: str) -> None:
        """Tear the connection down and cancel the request."""
        if self._transport is not None:
            _log.warning("a reader is cut off: %s", reason, extra=self.log_fields)
            self._transport.abort()
            self._transport = None  # the rows of this turn that are still to come change nothing
        self._lost()


class StreamClock:
    """What all streams of a process share: one flush a turn, one timer, one poll of the slow.

    No timer runs while no stream is open.
    """

    def __init__(
        self,
        keep_alive_s: float,
        *,
        stall_s: float = STALL_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.now = now
        self.stall_s = stall_s
        self._keep_alive_s = keep_alive_s
        self._tick_s = min(_MAX_TICK_S, keep_alive_s / 4)
        self._dirty: list[EventStream] = []
        self._streams: dict[EventStream, None] = {}
        self._watched: dict[EventStream, None] = {}
        self._ticking = False
        self._polling = False

    def mark(self, stream: EventStream) -> None:
        """Flush this stream at the end of the turn."""
        if not self._dirty:
            asyncio.get_running_loop().call_soon(self._flush)
        self._dirty.append(stream)

    def add(self, stream: EventStream) -> None:
        self._streams[stream] = None
        if not self._ticking:
            self._ticking = True
            asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def watch(self, stream: EventStream) -> None:
        self._watched[stream] = None
        if not self._polling:
            self._polling = True
            asyncio.get_running_loop().call_later(_POLL_S, self._poll)

    def discard(self, stream: EventStream) -> None:
        self._streams.pop(stream, None)
        self._watched.pop(stream, None)

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, []
        now = self.now()
        for stream in dirty:  # of all that is done for a stream, what is done for each token
            try:
                stream.flush(now)
            except Exception:
                self._failed(stream)

    def _each(self, streams: list[EventStream], do: Callable[[EventStream], None]) -> None:
        """One stream's failure ends that stream and no other."""
        for stream in streams:
            try:
                do(stream)
            except Exception:
                self._failed(stream)

    def _failed(self, stream: EventStream) -> None:
        _log.exception("a stream failed", extra=stream.log_fields)
        self._watched.pop(stream, None)
        stream.give_up("its stream failed")

    def _tick(self) -> None:
        self._ticking = bool(self._streams)
        if self._ticking:
            asyncio.get_running_loop().call_later(self._tick_s, self._tick)
        now = self.now()
        self._each(list(self._streams), lambda stream: stream.tick(now, self._keep_alive_s))

    def _poll(self) -> None:
        now = self.now()

        def poll(stream: EventStream) -> None:
            if not stream.poll(now):
                self._watched.pop(stream, None)

        self._each(list(self._watched), poll)
        self._polling = bool(self._watched)
        if self._polling:
            asyncio.get_running_loop().call_later(_POLL_S, self._poll)
