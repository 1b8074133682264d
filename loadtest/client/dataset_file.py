"""Prompts from files: ShareGPT conversations, and JSON lines."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from penstock.loadtest.client.prompts import Prompt

CHARACTERS_PER_TOKEN = 4
"""Estimate for English text, used where no tokenizer is given."""
# The limits under which ShareGPT figures are commonly published (vLLM's benchmark).
MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOTAL_TOKENS = 4, 1024, 2048

Count = Callable[[str], int]


class BadDataset(ValueError):
    """The file cannot be used. The message names it and the place."""


class Turn(msgspec.Struct):
    value: str
    speaker: str = msgspec.field(name="from", default="")


class Conversation(msgspec.Struct):
    """One of a ShareGPT file."""

    conversations: list[Turn] = []


class _Line(msgspec.Struct):
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    output_tokens: int | None = None


def token_counter(tokenizer: str | None) -> Count:
    """Counts with a ``tokenizer.json`` (or its folder), else estimates. Raises ``BadDataset``."""
    if not tokenizer:
        return lambda text: -(-len(text) // CHARACTERS_PER_TOKEN)
    from tokenizers import Tokenizer

    path = Path(tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        loaded = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise BadDataset(f"--tokenizer {path}: {error}") from None
    return lambda text: len(loaded.encode(text, add_special_tokens=False))


def read_file(path: str) -> bytes:
    """The whole file that ``--dataset-path`` names. Raises ``BadDataset``."""
    if not path:
        raise BadDataset("--dataset-path must name the file of this --dataset-name")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadDataset(f"--dataset-path {path}: {error.strerror or error}") from None


def read_sharegpt(path: str, seed: int, count: Count, output_len: int | None) -> list[Prompt]:
    """First question and answer of each conversation, shuffled by ``seed``.

    Kept are pairs with at least 4 tokens each, at most 1,024 in the prompt and 2,048 together.
    The length of the answer becomes ``max_tokens``, unless ``output_len`` is given. Raises
    ``BadDataset``.
    """
    try:
        read = msgspec.json.decode(read_file(path), type=list[Conversation])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadDataset(f"{path}: no ShareGPT file: {error}") from None
    pairs = [c.conversations for c in read if len(c.conversations) >= 2]
    random.Random(f"sharegpt {seed}").shuffle(pairs)
    found = []
    for question, answer, *_ in pairs:
        inputs, outputs = count(question.value), output_len or count(answer.value)
        if inputs < MIN_TOKENS or (output_len is None and outputs < MIN_TOKENS):
            continue
        if inputs > MAX_PROMPT_TOKENS or inputs + outputs > MAX_TOTAL_TOKENS:
            continue
        found.append(Prompt(_json(question.value), outputs, inputs))
    if not found:
        raise BadDataset(f"{path}: none of its {len(read)} conversations can be used")
    return found


def read_jsonl(path: str, count: Count, output_len: int | None, default_len: int) -> list[Prompt]:
    """One object a line: ``prompt`` (text or token ids) or ``messages``, and ``max_tokens``.

    ``output_tokens`` is read as ``max_tokens``. Lines that name neither take ``default_len``;
    ``output_len`` replaces what they name. Raises ``BadDataset`` with the number of the line.
    """
    decoder = msgspec.json.Decoder(_Line)
    found = []
    for number, line in enumerate(read_file(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            one = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BadDataset(f"{path}, line {number}: {error}") from None
        if (one.prompt is None) == (one.messages is None):
            raise BadDataset(f"{path}, line {number}: expected either prompt or messages")
        length = output_len or one.max_tokens or one.output_tokens or default_len
        found.append(_from_line(one, length, count))
    if not found:
        raise BadDataset(f"{path}: no lines")
    return found


def _from_line(line: _Line, output_len: int, count: Count) -> Prompt:
    if line.messages is not None:
        return Prompt(_json(line.messages), output_len, is_messages=True)
    if isinstance(line.prompt, str):
        return Prompt(_json(line.prompt), output_len, count(line.prompt))
    ids = line.prompt or []
    return Prompt(_json(ids), output_len, len(ids), is_ids=True)


def _json(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
