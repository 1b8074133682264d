"""A request between ``Taken`` and its end, as its tokenizer keeps it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from itertools import compress
from typing import Any

import msgspec

from penstock.protocol.ownership.choice import Choice, Stream, joined
from penstock.protocol.ownership.guard import MakeGuard, TokenExtras
from penstock.protocol.ownership.refusals import Refusals
from penstock.protocol.ownership.rejections import failed
from penstock.protocol.ownership.text_rows import TextRows
from penstock.protocol.ownership.tombstones import (
    MAX_RESTARTS,
    MAX_STALLS,
    RESEND_SECONDS,
)
from penstock.protocol.process.spans import SPANS
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.requests import (
    TOKEN_BYTES,
    Enqueue,
    Rejected,
    RequestHead,
    Submit,
    TokenWork,
    Work,
    split_ids,
)
from penstock.protocol.wire.messages.tokens import Content

HANDED_OVER = "its engine handed it over"
"""The cause of a new start that is no loss."""
MakeStream = Callable[[int], Stream]
"""Makes the stream of the choice with this number."""
_encode = msgspec.msgpack.Encoder().encode
_decode_work = msgspec.msgpack.Decoder(Work).decode


class RowFate(enum.Enum):
    """What becomes of a choice whose row has come."""

    GOES_ON = enum.auto()
    ENDED = enum.auto()
    """Its engine has ended it."""
    CUT = enum.auto()
    """It has ended, and its engine does not know."""
    AGAIN = enum.auto()
    """It is to be drawn again from where its tokens end now."""


def read_work(submit: Submit) -> Work | Rejected:
    """What a client asked for, or the refusal of what cannot be read."""
    try:
        return _decode_work(submit.work)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return failed(submit.id, submit.attempt, f"malformed: {error}")


class OwnedRequest:
    """What is needed to start the request again on another engine at any moment."""

    __slots__ = (
        "accepted",
        "attempt",
        "began",
        "choices",
        "continued",
        "engine",
        "frontend",
        "hand_overs",
        "handed_over_at",
        "head",
        "id",
        "open_choices",
        "refusals",
        "replayed",
        "reply_to",
        "resend_at",
        "restarts",
        "router",
        "stalls",
        "work",
    )

    def __init__(self, submit: Submit, head: RequestHead, now: float) -> None:
        self.head = head
        self.id = submit.id
        self.attempt = submit.attempt
        self.reply_to = submit.reply_to
        self.frontend = 0
        """Incarnation of the frontend; 0 while the membership does not name it yet."""
        self.began = now
        self.engine = 0
        """Incarnation of the scheduler that accepted it; 0 until then."""
        self.continued: tuple[float, str] | None = None
        """(since when, cause) while it is begun again after a loss and no engine has it."""
        self.hand_overs = 0
        """How often an engine has handed it over to another, …"""
        self.handed_over_at = 0.0
        """… since when none has gone on with it; 0: one has."""
        self.accepted = False
        """An engine has taken it while it was here."""
        self.work: TokenWork | None = None
        self.choices: dict[int, Choice] = {}
        self.open_choices = submit.choices
        self.replayed: dict[int, Content] = {}
        """What goes out with the next row: of a continuation, what it found unreleased."""
        self.refusals = Refusals()
        self.stalls = 0
        self.restarts = 0
        """How often it was sent to another engine."""
        self.resend_at = 0.0
        self.router = 0
        """Incarnation of the router that it may wait at; 0: it waits at none."""

    def lost(self, now: float, cause: str) -> None:
        """No engine has it any more: it is to be begun again."""
        if cause is HANDED_OVER:
            self.hand_overs += 1
            self.handed_over_at = self.handed_over_at or now
        self.engine = 0
        self.attempt += 1
        self.restarts += 1
        self.continued = now, cause

    def put_off(self, until: float) -> None:
        """An engine has no room for it: it is to be sent to another one then."""
        self.engine = self.router = 0
        self.attempt += 1
        self.restarts += 1
        self.resend_at = until

    def spent(self, cause: str) -> Rejected | None:
        """The end of a request that was started too often; ``cause``: of the next start."""
        is_stalled = self.stalls > MAX_STALLS
        if not is_stalled and self.restarts < MAX_RESTARTS:
            return None
        times = f"{self.stalls} times without a new token" if is_stalled else "256 times"
        told = f"the request was started {times} (last: {cause}); it was given up"
        return failed(self.id, self.attempt, told)

    def run_by(self, engine: int) -> None:
        """This incarnation has it."""
        self.engine = engine
        if self.continued is not None:
            SPANS.record_continuation("engine", self.head.trace, *self.continued)
            self.continued = None

    @property
    def was_accepted(self) -> bool:
        """An engine has taken it, here or before it came here."""
        return self.accepted or self.head.accepted

    def taken(self, max_tokens: int) -> bool:
        """An engine has taken it, and leaves it so many tokens: what it goes on with elsewhere.
        Returns whether this is news."""
        if self.work is not None and 0 < max_tokens < self.work.max_tokens:
            self.work = msgspec.structs.replace(self.work, max_tokens=max_tokens)
        known, self.accepted = self.accepted, True
        return not known

    def taken_over(
        self, more: TokenExtras, now: float, tell: Callable[[float], None]
    ) -> TokenExtras:
        """The first row of an engine behind a hand-over, with the seconds that this took, which
        ``tell`` hears. Where none is known here, the choice has begun before: nothing starts."""
        start, since = more.start, self.handed_over_at
        if start is None or start.handed_over_s < 0.0:
            return more
        self.handed_over_at = 0.0
        if not since:
            return msgspec.structs.replace(more, start=None)
        tell(now - since)
        started = msgspec.structs.replace(start, handed_over_s=now - since)
        return msgspec.structs.replace(more, start=started)

    def encoded(
        self,
        work: TokenWork,
        params: SamplingParams,
        make_stream: MakeStream,
        make_guard: MakeGuard | None = None,
    ) -> None:
        """The prompt is turned into tokens; streams begin after what the work brings along."""
        self.work = work
        detailed = params.echo or params.logprobs is not None or params.prompt_logprobs is not None
        for state in work.choices:
            guard = make_guard() if make_guard is not None else None
            choice = self.choices[state.choice] = Choice(
                make_stream(state.choice), detailed, params.stop_token_ids, guard
            )
            if state.output:
                tokens = memoryview(state.output).cast("i")
                self.replayed[state.choice] = choice.replay(tokens, state.released)
        self.open_choices = len(self.choices)

    def add_row(
        self, out: TextRows, number: int, choice: Choice, tokens: memoryview, more: TokenExtras
    ) -> RowFate:
        """Turn the next int32 tokens of a choice into a row for its client, and say what becomes
        of the choice."""
        has_ended = more.end is not None
        if len(tokens) or more.pooled is not None:
            self.stalls = 0
        if choice.guard is not None:
            tokens, more, again = choice.guard.take(tokens, more)
            choice.received = choice.count + len(tokens) + choice.held
            if again:
                return RowFate.AGAIN
            if not len(tokens) and more.end is None:
                return RowFate.GOES_ON
        content, tokens, end = choice.push(tokens, more.end)
        if more.pooled is not None:
            content = joined([choice.stream.pooled(more.pooled)], content)
        if self.replayed:
            content = joined(self.replayed.pop(number, ""), content)
        content = choice.redrawn(content)
        out.add(self.id, self.attempt, number, choice, tokens, content, end, more)
        if end is None:
            return RowFate.GOES_ON
        return RowFate.ENDED if has_ended else RowFate.CUT

    def enqueue(self, work: TokenWork, own_address: str, now: float) -> Enqueue:
        """The message to an engine: the work, with the open choices as they are now."""
        head, passed = work.head, now - self.began
        changes: dict[str, Any] = {
            "age": head.age + passed,
            "accepted": self.was_accepted,
            "hand_overs": self.hand_overs,
        }
        if head.time_left is not None:
            changes["time_left"] = max(0.0, head.time_left - passed)
        choices = [
            choice.state(number) for number, choice in self.choices.items() if not choice.ended
        ]
        work = self._open_prompts(work)
        self.resend_at = now + RESEND_SECONDS
        body = _encode(
            msgspec.structs.replace(
                work,
                head=msgspec.structs.replace(head, **changes),
                choices=choices,
                stalls=self.stalls,
            )
        )
        longest = max(work.lengths) if work.lengths else len(work.prompt) // TOKEN_BYTES
        return Enqueue(
            self.id,
            self.attempt,
            own_address,
            body,
            head.model,
            work.prefix,
            len(choices),
            head.virtual_tokens + longest + work.max_tokens,
            head.task,
            SPANS.wanted(head.trace),
            head.adapter,
            self.hand_overs > 0 or any(state.output for state in choices),
            head.deterministic,
        )

    def _open_prompts(self, work: TokenWork) -> TokenWork:
        """Without the prompts of a batch that are done."""
        if not work.lengths or self.open_choices == len(work.lengths):
            return work
        is_open = [not choice.ended for choice in self.choices.values()]
        prompts = split_ids(work.prompt, work.lengths)
        return msgspec.structs.replace(
            work,
            prompt=b"".join(compress(prompts, is_open)),
            lengths=list(compress(work.lengths, is_open)),
            seconds=list(compress(work.seconds, is_open)),
        )
