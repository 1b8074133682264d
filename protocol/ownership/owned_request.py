"""A request between ``Taken`` and its end, as its tokenizer keeps it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from penstock.protocol.ownership.refusals import Refusals
from penstock.protocol.ownership.text_rows import Choice, Stream
from penstock.protocol.ownership.tombstones import RESEND_SECONDS
from penstock.protocol.wire.messages.requests import (
    ChoiceState,
    Enqueue,
    Submit,
    TokenWork,
    submission_of,
)
from penstock.protocol.wire.messages.tokens import Content

_encode = msgspec.msgpack.Encoder().encode


class OwnedRequest:
    """What is needed to start the request again on another engine at any moment."""

    __slots__ = (
        "accepted",
        "attempt",
        "began",
        "choices",
        "engine",
        "frontend",
        "id",
        "open_choices",
        "refusals",
        "replayed",
        "reply_to",
        "resend_at",
        "stalls",
        "work",
    )

    def __init__(self, submit: Submit, now: float) -> None:
        self.id = submit.id
        self.attempt = submit.attempt
        self.reply_to = submit.reply_to
        self.frontend = 0
        """Incarnation of the frontend; 0 while the membership does not name it yet."""
        self.began = now
        self.engine = 0
        """Incarnation of the scheduler that accepted it; 0 until then."""
        self.accepted = False
        self.work: TokenWork | None = None
        self.choices: dict[int, Choice] = {}
        self.open_choices = 0
        self.replayed: dict[int, Content] = {}
        """What a continuation found unreleased; goes out with the next row."""
        self.refusals = Refusals()
        self.stalls = 0
        self.resend_at = 0.0

    def encoded(self, work: TokenWork, make_stream: Callable[[TokenWork], Stream]) -> None:
        """The prompt is turned into tokens; streams begin after what the work brings along."""
        self.work = work
        params = work.params
        detailed = params.echo or params.logprobs is not None or params.prompt_logprobs is not None
        for state in work.choices:
            choice = self.choices[state.choice] = Choice(
                make_stream(work), detailed, params.stop_token_ids
            )
            if state.output:
                tokens = memoryview(state.output).cast("i")
                self.replayed[state.choice] = choice.replay(tokens, state.released)
        self.open_choices = len(self.choices)

    def enqueue(self, work: TokenWork, own_address: str, now: float) -> Enqueue:
        """The message to an engine: the work, with the open choices as they are now."""
        changes: dict[str, Any] = {
            "choices": [
                ChoiceState(number, bytes(choice.output), choice.released)
                for number, choice in self.choices.items()
                if not choice.ended
            ],
            "age": work.age + now - self.began,
            "accepted": self.accepted or submission_of(self.attempt) > 1,
            "stalls": self.stalls,
        }
        if work.time_left is not None:
            changes["time_left"] = max(0.0, work.time_left - (now - self.began))
        self.resend_at = now + RESEND_SECONDS
        tokens = sum(len(work.prompt) + len(c.output) for c in self.choices.values()) // 4
        body = _encode(msgspec.structs.replace(work, **changes))
        return Enqueue(self.id, self.attempt, own_address, tokens, b"", body)
