"""Tokens on their way back: one columnar message a step and destination.

A row is (id, choice, attempt, index of its first output token, tokens, end or none). The end
rides in the row that brings the last token, never in a message of its own. A receiver takes only
its current attempt and exactly the next index.
"""

from __future__ import annotations

import enum

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


class RowStart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How row ``row`` of a batch, the first of its choice, came to run; index 0 only."""

    row: int
    cached: int
    """Prompt tokens that were found in the prefix cache."""
    queued_s: float
    """Seconds from the request's arrival at the server until the choice first ran."""


class RowLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What row ``row`` of a ``TokenBatch`` brings beside its tokens, if its request asks for it."""

    row: int
    tokens: PackedLogprobs | None
    """Of the row's tokens."""
    prompt: PackedLogprobs | None = None
    """Of the prompt's tokens from the second one on; with index 0."""


class RowDetails(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What row ``row`` of a ``TextBatch`` brings beside its text, if its request asks for it."""

    row: int
    tokens: NamedLogprobs | None
    prompt: NamedLogprobs | None = None
    """With index 0."""
    echo: str = ""
    """The prompt's text, for ``echo``; with index 0."""


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


class TextBatch(msgspec.Struct, frozen=True, array_like=True, tag=31, gc=False):
    """Tokenizer → one frontend: the text of one step.

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
    """Characters released in all, this row's text included."""
    ends: list[End]
    starts: list[RowStart] = []
    details: list[RowDetails] = []
