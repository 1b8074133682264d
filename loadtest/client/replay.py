"""Traces: requests that somebody recorded, sent again at their times.

JSON lines, each with a time and with lengths or a prompt of its own:

- Mooncake's: ``timestamp`` (milliseconds), ``input_length``, ``output_length``, ``hash_ids``: one
  for each block of the prompt; blocks with the same id are the same tokens;
- the scheduler's (``policy_trace.py``): ``arrival`` (seconds), ``prompt``, ``output``;
- ``timestamp`` or ``arrival`` with ``prompt`` (text or token ids) or ``messages``, ``max_tokens``.

A CSV as Azure's LLM inference traces: ``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens``.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import msgspec

from penstock.loadtest.client.dataset_file import BadDataset, read_file
from penstock.loadtest.client.prompts import Prompt
from penstock.loadtest.client.sessions import Answer, Form, pool_of

KEPT_BLOCKS = 4096
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class _Line(msgspec.Struct):
    timestamp: float | None = None
    arrival: float | None = None
    input_length: int | None = None
    output_length: int | None = None
    hash_ids: list[int] = []
    prompt: int | str | list[int] | None = None
    output: int | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None


class Recorded(msgspec.Struct, frozen=True):
    """One request of a trace."""

    arrival: float
    """Seconds, by the trace's clock."""
    input_len: int
    """Tokens of the prompt; of a prompt of its own 0, unless it is token ids."""
    output_len: int
    """0: the trace does not say."""
    blocks: list[int] = []
    content: str | list[int] | list[dict[str, Any]] | None = None
    """The prompt or the messages, where the trace has them."""
    is_messages: bool = False

    @property
    def is_ids(self) -> bool:
        return isinstance(self.content, list) and not self.is_messages


def read_trace(path: str, default_len: int) -> list[Recorded]:
    """All requests, in the order of their arrival. Lines without a length of the answer take
    ``default_len``. Raises ``BadDataset`` with the number of the line."""
    text = read_file(path)
    first = text.partition(b"\n")[0]
    found = list(_azure(path, text) if first.startswith(b"TIMESTAMP") else _json(path, text))
    if not found:
        raise BadDataset(f"{path}: no requests")
    return sorted(
        (msgspec.structs.replace(one, output_len=one.output_len or default_len) for one in found),
        key=lambda one: one.arrival,
    )


def _json(path: str, text: bytes) -> Iterator[Recorded]:
    decoder = msgspec.json.Decoder(_Line)
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield _recorded(decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
            raise BadDataset(f"{path}, line {number}: {error}") from None


def _recorded(line: _Line) -> Recorded:
    """Raises ``ValueError``."""
    if line.timestamp is None and line.arrival is None:
        raise ValueError("expected timestamp (milliseconds) or arrival (seconds)")
    arrival = line.arrival if line.timestamp is None else line.timestamp / 1e3
    told = [n for n in (line.output_length, line.output, line.max_tokens) if n is not None]
    output = max(1, told[0]) if told else 0
    content = line.messages if line.messages is not None else line.prompt
    if isinstance(content, str | list):
        if not content:
            raise ValueError("an empty prompt")
        is_messages = line.messages is not None
        size = len(content) if isinstance(content, list) and not is_messages else 0
        return Recorded(arrival or 0.0, size, output, content=content, is_messages=is_messages)
    length = line.input_length if content is None else content
    if length is None or length < 1:
        raise ValueError("expected input_length, prompt or messages")
    return Recorded(arrival or 0.0, length, output, line.hash_ids)


def _azure(path: str, text: bytes) -> Iterator[Recorded]:
    rows = csv.DictReader(text.decode("utf-8", "replace").splitlines())
    if not set(AZURE_COLUMNS) <= set(rows.fieldnames or ()):
        raise BadDataset(f"{path}: expected the columns {', '.join(AZURE_COLUMNS)}")
    for number, row in enumerate(rows, start=2):
        stamp, inputs, outputs = (row[name] or "" for name in AZURE_COLUMNS)
        try:
            # Seven digits of a second, which Python 3.11 reads, and no zone.
            at = datetime.fromisoformat(stamp.strip().rstrip("Z")[:26]).timestamp()
            yield Recorded(at, int(inputs), max(1, int(outputs)))
        except ValueError as error:
            raise BadDataset(f"{path}, line {number}: {error}") from None


class Replay:
    """The prompts of a trace, see ``workload.Source``. They are made when they are sent: those of
    an hour's trace together are gigabytes."""

    def __init__(
        self, trace: Sequence[Recorded], form: Form, seed: int | str, *, speed: float, block: int,
        vocab_size: int,
    ) -> None:  # fmt: skip
        """speed: the trace's seconds in one of ours; block: tokens of a ``hash_id``."""
        self._form = form
        self._seed = seed
        self._speed = speed
        self._block = block
        self._pool = pool_of(form, vocab_size)
        self._made = lru_cache(KEPT_BLOCKS)(self._drawn)
        self._take(trace)

    def _take(self, trace: Sequence[Recorded]) -> None:
        self._trace = trace
        began = trace[0].arrival if trace else 0.0
        self.arrivals: Sequence[float] | None = [
            (one.arrival - began) / self._speed for one in trace
        ]
        self.turns = [1] * len(trace)
        self.input_lens: list[int | None] = [one.input_len or None for one in trace]
        self.output_lens = [one.output_len for one in trace]

    def keep(self, max_model_len: int) -> int:
        """Leave out what is longer than a server takes. Returns how many stay."""
        lengths = ((one, one.input_len + one.output_len) for one in self._trace)
        self._take([one for one, length in lengths if length <= max_model_len])
        return len(self._trace)

    def prompt(self, index: int, answers: Sequence[Answer]) -> Prompt:
        one = self._trace[index]
        if one.content is not None:
            return _own(one)
        joined = (b"," if self._form == "ids" else b" ").join(self._parts(index, one))
        content = b"[%s]" % joined if self._form == "ids" else b'"%s"' % joined
        return Prompt(
            msgspec.Raw(content), one.output_len, one.input_len, is_ids=self._form == "ids"
        )

    def _parts(self, index: int, one: Recorded) -> Iterator[bytes]:
        left = one.input_len
        for name in one.blocks:
            if left <= 0:
                return
            yield self._made(f"block {name}", min(self._block, left))
            left -= self._block
        if left > 0:  # what no block names is this request's own
            yield self._drawn(f"request {index}", left)

    def _drawn(self, name: str, length: int) -> bytes:
        """So many tokens; a shorter piece of the same name begins alike."""
        draw = random.Random(f"trace {self._seed} {name}")
        return (b"," if self._form == "ids" else b" ").join(
            str(part).encode() for part in draw.choices(self._pool, k=length)
        )


def _own(one: Recorded) -> Prompt:
    """A prompt that the trace holds; ``Workload`` has checked that the endpoint takes it."""
    raw = msgspec.Raw(msgspec.json.encode(one.content))
    return Prompt(
        raw, one.output_len, one.input_len or None, is_messages=one.is_messages, is_ids=one.is_ids
    )
