"""Tokens on their way back: one columnar message a step and destination.

A row is (id, choice, attempt, index of its first output token, tokens, end or none). The end
rides in the row that brings the last token, never in a message of its own. A receiver takes only
its current attempt and exactly the next index.

What the tokens of a row mean is a list of events of one vocabulary (``Event``). Every API is a
rendering of it. A row that is one ``Text`` without logprobs travels as its string alone.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from penstock.protocol.logprobs import NamedLogprobs, PackedLogprobs


class EndReason(enum.IntEnum):
    """Why a choice ended. ``ERROR`` and ``ABORT`` carry a message."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


class End(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The end of one choice, for row ``row`` of its batch."""

    row: int
    reason: EndReason
    stop: int | str | None = None
    """The stop token or stop string that was found; for a client, only one that it named."""
    message: str = ""
    status: int = 0
    """HTTP status that an error stands for."""
    reasoning_tokens: int = 0
    """How many of the choice's tokens were thinking."""
    preemptions: int = -1
    """How often its engine took its KV blocks from it, to compute it anew; -1: its engine did not
    end it."""
    accepted_drafts: int = 0
    """Tokens that were drafted and stand in the choice, as far as its last engine knows."""
    rejected_drafts: int = 0
    """Tokens that were drafted, and were not what the model drew."""


class RowStart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How row ``row`` of a batch, the first of its choice in an engine, came to run."""

    row: int
    cached: int
    """Prompt tokens that were found in the prefix cache."""
    queued_s: float
    """Seconds from the request's arrival at the server until the choice first ran."""
    engine: str = ""
    """Name of the engine that it ran in."""
    max_tokens: int = 0
    """As in ``Accepted``, which may have been lost. For a client 0."""
    handed_over_s: float = -1.0
    """Of a later row, the first behind a hand-over to this engine: seconds since its last engine
    let go of it, which its tokenizer fills in. -1: the choice begins."""


class RowLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What row ``row`` of a ``TokenBatch`` brings beside its tokens, if its request asks for it."""

    row: int
    tokens: PackedLogprobs | None
    """Logprobs of the row's tokens."""
    prompt: PackedLogprobs | None = None
    """Logprobs of the prompt's tokens from the second one on; only for index 0."""


class RowPooled(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a prompt that row ``row`` has computed brings for a task other than to generate."""

    row: int
    values: bytes
    """As the task's ``pool`` made it (``penstock.protocol.tasks``)."""


class RowDetails(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What row ``row`` of a ``TextBatch`` brings beside its text, if its request asks for it."""

    row: int
    tokens: NamedLogprobs | None
    prompt: NamedLogprobs | None = None
    """Logprobs of the prompt's tokens; only for index 0."""
    echo: str = ""
    """The prompt's text, for ``echo``; with index 0."""


class Text(msgspec.Struct, frozen=True, array_like=True, tag="text", gc=False):
    """A part of the answer."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, array_like=True, tag="reasoning", gc=False):
    """A part of what the model thinks before it answers."""

    text: str
    """Empty: the client does not want to see it; the row's tokens were thinking all the same."""


MAX_CALLS = 1024
"""Tool calls of one answer, and so of one message. What an answer writes behind them is text."""


class ToolCallOpened(msgspec.Struct, frozen=True, array_like=True, tag="call", gc=False):
    """The model begins to call a tool; its arguments follow."""

    index: int
    """The number of the call among those of its choice."""
    id: str
    name: str


class ToolArguments(msgspec.Struct, frozen=True, array_like=True, tag="arguments", gc=False):
    """A part of a call's arguments, which are JSON as the model wrote it."""

    index: int
    text: str


class Vector(msgspec.Struct, frozen=True, array_like=True, tag="vector", gc=False):
    """What the task ``embed`` brings for a prompt."""

    values: bytes
    """float32, little endian."""


class Scores(msgspec.Struct, frozen=True, array_like=True, tag="scores", gc=False):
    """What the tasks ``score`` and ``classify`` bring for a prompt."""

    values: bytes
    """float32, little endian; one for each label or pair."""


class TokenIds(msgspec.Struct, frozen=True, array_like=True, tag="ids", gc=False):
    """What the task ``tokenize`` brings for a prompt."""

    values: bytes
    """int32, little endian."""


Pooled: TypeAlias = Vector | Scores | TokenIds
"""Events that stand for a whole prompt, as bytes."""
Event: TypeAlias = Text | Reasoning | ToolCallOpened | ToolArguments | Pooled
Content: TypeAlias = str | list[Event]
"""What some tokens bring, in order. A string stands for one ``Text``."""


class Released(msgspec.Struct, array_like=True, gc=False):
    """How much of a choice has gone out to its client on each channel. A new tokenizer sends only
    what lies after it. What stands for a prompt comes once, with the end, and needs no count."""

    text: int = 0
    """Characters of ``Text``."""
    reasoning: int = 0
    """Characters of ``Reasoning``."""
    calls: int = 0
    """Calls that were opened."""
    arguments: int = 0
    """Characters of ``ToolArguments``, over all calls."""
    redraws: int = 0
    """How often the choice had gone back when the last of its tokens here was drawn."""

    def add(self, events: list[Event]) -> None:
        """Count what goes out now."""
        for event in events:
            match event:
                case Text():
                    self.text += len(event.text)
                case Reasoning():
                    self.reasoning += len(event.text)
                case ToolCallOpened():
                    self.calls += 1
                case ToolArguments():
                    self.arguments += len(event.text)


class RowEvents(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The events of row ``row`` of a ``TextBatch`` that is more than one plain text."""

    row: int
    events: list[Event]
    """In order; the row's entry in ``texts`` is empty."""
    released: Released
    """In all, this row included."""


class TokenBatch(msgspec.Struct, frozen=True, array_like=True, tag=30, gc=False):
    """Scheduler → one tokenizer: the tokens of one step."""

    ids: list[int]
    choices: list[int]
    attempts: list[int]
    indices: list[int]
    counts: list[int]
    """Tokens in each row; 0 for a row that only ends."""
    tokens: bytes
    """int32 token ids of all rows one after another, little endian."""
    ends: list[End]
    starts: list[RowStart] = []
    logprobs: list[RowLogprobs] = []
    pooled: list[RowPooled] = []


class TextBatch(msgspec.Struct, frozen=True, array_like=True, tag=31, gc=False):
    """Tokenizer → one frontend: the events of one step.

    A row may hold tokens without text (an unfinished character, a possible stop string).
    """

    ids: list[int]
    choices: list[int]
    attempts: list[int]
    indices: list[int]
    counts: list[int]
    tokens: bytes
    texts: list[str]
    released: list[int]
    """Characters of text released in all, this row's included."""
    ends: list[End]
    starts: list[RowStart] = []
    details: list[RowDetails] = []
    events: list[RowEvents] = []


class Continued(msgspec.Struct, frozen=True, array_like=True, tag=32, gc=False):
    """Scheduler → tokenizer → frontend: these begin again behind the loss of a process that had
    them: a worker, after which their scheduler keeps them; an engine, or the router that they
    waited at, after which their tokenizer does. Columns.

    It is for counting alone, and comes when it happens: so no later loss takes the count along.
    """

    ids: list[int]
    attempts: list[int]
