"""Where a model thinks before it answers: a grammar holds for the answer alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.services.tokenizer.channel_grammar import Turn
from penstock.services.tokenizer.output.family import Family, ReasoningMarks
from penstock.services.tokenizer.text_model import TextModel

_TAIL = 512
"""Tokens of a prompt's end that are looked at for marks that are no tokens of their own."""
_BLOCK = 4096
"""Tokens that are looked through at a time, from the end."""


class Thinking(NamedTuple):
    """int32 token ids, little endian; both empty: the answer begins at once."""

    start_after: bytes = b""
    """The answer begins after this token …"""
    may_open: bytes = b""
    """… if this one is the first that comes; empty: whatever comes first."""


def thinking(text_model: TextModel, prompt: bytes, marks: ReasoningMarks | None) -> Thinking:
    """What a model may think before it answers.

    A model thinks where it has marks of thinking, its vocabulary has the closing one (``</think>``)
    as one token, and the prompt's last turn does not show the thinking as ended. Where the prompt
    opens it, the model is in the midst of it; else it may open it or answer at once, as many models
    do that think only where they are asked to. A prompt without control tokens is no chat: it
    thinks only where it ends within an open ``<think>``.

    It depends on nothing but the prompt's ids, so that a continuation, which brings those instead
    of messages, gets the same answer.

    Args:
        prompt: int32 token ids, little endian.
        marks: of the model's thinking (``OutputForm``); ``None``: it has none.
    """
    if marks is None:
        return Thinking()
    end = text_model.token_id(marks.close)
    if end is None or not text_model.has_chat_template:
        return Thinking()
    ids = np.frombuffer(prompt, "<i4")
    begin = text_model.token_id(marks.open)
    control = [number for number in text_model.special_ids if number not in (begin, end)]
    turn = _last(ids[1:], control)  # the first token may only say that a text begins
    opened, ended = _last(ids[1:], [] if begin is None else [begin]), _last(ids[1:], [end])
    if max(turn, opened) < 0 or ended > max(turn, opened):
        return Thinking()
    after = end.to_bytes(4, "little")
    if opened > turn or begin is None:
        return Thinking(after)
    return Thinking(after, begin.to_bytes(4, "little"))


def begins_in_reasoning(text_model: TextModel, prompt: bytes, family: Family) -> bool:
    """Whether the prompt has opened the thinking that the output goes on with.

    Args:
        prompt: int32 token ids, little endian.
    """
    if family.channel_thinking is not None:
        return _is_within(text_model, prompt, family, family.channel_thinking.opened)
    reasoning = family.reasoning
    if reasoning is None:
        return False
    if text_model.token_id(reasoning.close) is not None:
        thought = thinking(text_model, prompt, reasoning)
        return bool(thought.start_after) and not thought.may_open
    tail = _tail(text_model, prompt, None)
    return tail.rfind(reasoning.open) > tail.rfind(reasoning.close)


def channel_turn(text_model: TextModel, prompt: bytes, family: Family) -> Turn:
    """Where in the model's turn the prompt ends, for a family with channels.

    Args:
        prompt: int32 token ids, little endian.
    """
    within = begins_in_reasoning(text_model, prompt, family)
    if "channel" not in family.marks:  # only harmony's can begin calls in one place alone
        reply = "" if family.channel_thinking is None else family.channel_thinking.reply[0]
        if not within and reply and _is_within(text_model, prompt, family, reply):
            return Turn.REPLY
        return Turn.THINKING if within else Turn.HEADER
    if _tail(text_model, prompt, family.marks["start"]).strip() == "assistant":
        return Turn.HEADER
    return Turn.THINKING if within else Turn.ELSEWHERE


def _is_within(text_model: TextModel, prompt: bytes, family: Family, opening: str) -> bool:
    """Whether the prompt ends within a message that begins so."""
    ids = np.frombuffer(prompt, "<i4")
    known = (text_model.token_id(mark) for mark in family.marks.values())
    mark = _last(ids, [number for number in known if number is not None])
    # Behind the last mark there may be much text: a message that is to be continued.
    end = len(ids) if mark < 0 else mark
    tail = ids[max(0, end - _TAIL) :].tolist()
    text: str = text_model.tokenizer.decode(tail, skip_special_tokens=False)
    _, opened, behind = text.rpartition(opening.strip())
    return bool(opened) and not any(mark in behind for mark in family.marks.values())


def _tail(text_model: TextModel, prompt: bytes, start: str | None) -> str:
    """The end of the prompt as text, from its last control token on, or from the last ``start``."""
    ids = np.frombuffer(prompt, "<i4")[-_TAIL:]
    begin = text_model.token_id(start) if start is not None else None
    place = _last(ids, list(text_model.special_ids) if begin is None else [begin])
    text: str = text_model.tokenizer.decode(ids[place + 1 :].tolist(), skip_special_tokens=False)
    return text


def _last(ids: np.ndarray[tuple[int], np.dtype[np.int32]], wanted: list[int]) -> int:
    """Where one of these ids stands last, or -1. It is looked for from the end."""
    if not wanted:
        return -1
    for stop in range(len(ids), 0, -_BLOCK):
        block = ids[max(0, stop - _BLOCK) : stop]
        found = block == wanted[0] if len(wanted) == 1 else np.isin(block, wanted)
        (places,) = found.nonzero()
        if len(places):
            return int(places[-1]) + max(0, stop - _BLOCK)
    return -1
