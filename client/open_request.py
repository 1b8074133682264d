"""A request between its submission and its end, as its frontend keeps it."""

from __future__ import annotations

from itertools import compress
from typing import Any

import msgspec

from penstock.client.batches import as_one
from penstock.client.sink import Sink
from penstock.protocol.ownership.tombstones import RESEND_SECONDS
from penstock.protocol.process.spans import SPANS
from penstock.protocol.wire.messages.requests import (
    ChoiceState,
    Inputs,
    Pair,
    Tokens,
    Work,
    prompts_of,
    split_ids,
)
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
        "continued",
        "deadline",
        "id",
        "is_batch",
        "lengths",
        "max_tokens",
        "open_choices",
        "prompt",
        "resend_at",
        "router",
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
        self.continued: tuple[float, str] | None = None
        """(since when, cause) while it is begun again after a loss and nobody has taken it."""
        self.accepted = False
        self.is_batch = isinstance(work.prompt, Inputs)
        """Each choice has its own prompt."""
        self.prompt = b""
        self.lengths: list[int] = []
        """These two as in ``Accepted``."""
        self.max_tokens = 0
        self.choices = {state.choice: OpenChoice() for state in work.choices}
        self.open_choices = len(self.choices)
        self.stalls = 0
        self.resend_at = now + RESEND_SECONDS
        self.router = 0
        """Incarnation of the router that it may wait at; 0: it waits at none."""
        self.untaken_since = now

    def lost(self, now: float, cause: str) -> None:
        """Nobody owns it any more: it is to be begun again."""
        self.tokenizer = 0
        self.continued = now, cause

    def taken_by(self, tokenizer: int) -> None:
        """This incarnation owns it."""
        self.tokenizer = tokenizer
        if self.continued is not None:
            SPANS.record_continuation("tokenizer", self.work.head.trace, *self.continued)
            self.continued = None

    @property
    def model(self) -> str:
        return self.work.head.model

    @property
    def weight(self) -> int:
        """What it counts as where requests are counted: of a batch each open prompt does."""
        return self.open_choices if self.is_batch else 1

    def prompt_of(self, choice: int) -> bytes:
        """int32 ids of an accepted prompt."""
        return split_ids(self.prompt, self.lengths)[choice if self.is_batch else 0]

    def work_now(self, now: float) -> Work:
        """What is asked of a tokenizer: what is still open of it, with what has come of that. A
        prompt that is known as ids is not rendered again."""
        work = self.work
        left = None if self.deadline is None else max(0.0, self.deadline - now)
        changes: dict[str, Any] = {
            "head": msgspec.structs.replace(
                work.head, age=now - self.arrived, time_left=left, accepted=self.accepted
            )
        }
        is_open = [not choice.ended for choice in self.choices.values()]
        if self.submission > 1:
            states = (choice.state(number) for number, choice in self.choices.items())
            changes["choices"] = list(compress(states, is_open))
        prompts = list(prompts_of(work))
        if self.prompt and not isinstance(prompts[0], Pair):
            prompts = [Tokens(ids) for ids in split_ids(self.prompt, self.lengths)]
            changes["params"] = msgspec.structs.replace(work.params, max_tokens=self.max_tokens)
            if (asked := work.pooling) is not None:  # the ids have what stands ahead already
                asked = msgspec.structs.replace(asked, prompt_name="", input_type="")
                changes["pooling"] = asked
        changes["prompt"] = (
            as_one(list(compress(prompts, is_open))) if self.is_batch else prompts[0]
        )
        return msgspec.structs.replace(work, **changes)
