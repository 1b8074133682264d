"""A request between its submission and its end, as its frontend keeps it."""

from __future__ import annotations

import msgspec

from penstock.client.sink import Sink
from penstock.protocol.ownership.tombstones import RESEND_SECONDS
from penstock.protocol.wire.messages.requests import ChoiceState, Work
from penstock.protocol.wire.messages.tokens import Released


class OpenChoice:
    """What has come of one choice: ``output`` holds its token ids as int32 bytes."""

    __slots__ = ("count", "ended", "output", "released", "released_text")

    def __init__(self) -> None:
        self.output = bytearray()
        self.count = 0
        self.released = Released()
        """What has gone out on each channel, but for ``text``: ``released_text`` is newer."""
        self.released_text = 0
        self.ended = False

    def state(self, number: int) -> ChoiceState:
        """What a tokenizer needs to go on with it, as choice ``number``."""
        released = msgspec.structs.replace(self.released, text=self.released_text)
        return ChoiceState(number, bytes(self.output), released)


class OpenRequest:
    """What is needed to start the request again elsewhere at any moment."""

    __slots__ = (
        "accepted",
        "arrived",
        "began",
        "choices",
        "deadline",
        "id",
        "max_tokens",
        "open_choices",
        "prompt",
        "resend_at",
        "sink",
        "stalls",
        "submission",
        "tokenizer",
        "untaken_since",
        "wants_ids",
        "work",
    )

    def __init__(self, request_id: int, work: Work, sink: Sink, now: float) -> None:
        self.id = request_id
        self.work = work
        self.sink = sink
        self.wants_ids = sink.wants_ids
        self.arrived = now - work.head.age
        self.began = now
        time_left = work.head.time_left
        self.deadline = None if time_left is None else now + time_left
        self.submission = 1
        self.tokenizer = 0
        """Incarnation of the tokenizer that owns it; 0 until ``Taken``."""
        self.accepted = False
        self.prompt = b""
        self.max_tokens = 0
        self.choices = {state.choice: OpenChoice() for state in work.choices}
        self.open_choices = len(self.choices)
        self.stalls = 0
        self.resend_at = now + RESEND_SECONDS
        self.untaken_since = now

    @property
    def model(self) -> str:
        return self.work.head.model
