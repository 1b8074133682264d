"""Conversations from files: ShareGPT's, and JSON lines with the user's turns."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from penstock.loadtest.client.dataset_file import BadDataset, Conversation, Count, read_file
from penstock.loadtest.client.sessions import Session, Turn

ASKS, ANSWERS = ("human", "user"), ("gpt", "assistant", "chatgpt", "bing")
"""What files call who speaks."""


class _Line(msgspec.Struct):
    turns: list[str]
    system: str = ""
    max_tokens: int | None = None


def read_conversations(
    path: str, count: Count, output_len: int | None, default_len: int
) -> list[Session]:
    """All conversations of a file, with the questions of its users; what is answered is the
    server's.

    A JSON array as ShareGPT has it, where the length of each answer becomes ``max_tokens``; or
    one object a line: ``turns`` (texts), and perhaps ``system`` and ``max_tokens`` of each turn,
    otherwise ``default_len``. ``output_len`` replaces all of these. Raises ``BadDataset``.
    """
    text = read_file(path)
    found = list(
        _sharegpt(path, text, count, default_len)
        if text.lstrip().startswith(b"[")
        else _lines(path, text, default_len)
    )
    if not found:
        raise BadDataset(f"{path}: no conversations")
    if output_len is None:
        return found
    return [_with_length(session, output_len) for session in found]


def _with_length(session: Session, length: int) -> Session:
    turns = [msgspec.structs.replace(turn, output_len=length) for turn in session.turns]
    return msgspec.structs.replace(session, turns=turns)


def _lines(path: str, text: bytes, default_len: int) -> Iterator[Session]:
    decoder = msgspec.json.Decoder(_Line)
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            one = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BadDataset(f"{path}, line {number}: {error}") from None
        if not one.turns:
            raise BadDataset(f"{path}, line {number}: no turns")
        asked = [Turn([said], [], one.max_tokens or default_len) for said in one.turns]
        yield Session([one.system] if one.system else [], asked)


def _sharegpt(path: str, text: bytes, count: Count, default_len: int) -> Iterator[Session]:
    try:
        read = msgspec.json.decode(text, type=list[Conversation])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadDataset(f"{path}: no ShareGPT file: {error}") from None
    for one in read:
        turns: list[Turn] = []
        for said in one.conversations:
            if said.speaker in ASKS and said.value:
                turns.append(Turn([said.value], [], default_len))
            elif said.speaker in ANSWERS and turns:
                length = max(1, count(said.value))
                turns[-1] = msgspec.structs.replace(turns[-1], output_len=length)
        if turns:
            yield Session([], turns)
