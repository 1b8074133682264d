"""Where a model thinks before it answers: a grammar holds for the answer alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.services.tokenizer.text_model import TextModel

THINK_BEGIN = "<think>"
THINK_END = "</think>"


class Thinking(NamedTuple):
    """int32 token ids, little endian; both empty: the answer begins at once."""

    start_after: bytes = b""
    """The answer begins after this token …"""
    may_open: bytes = b""
    """… if this one is the first that comes; empty: whatever comes first."""


def thinking(text_model: TextModel, prompt: bytes) -> Thinking:
    """What a model may think before it answers.

    A model thinks where its chat template knows ``</think>``, its vocabulary has that as one token,
    and the prompt's last turn does not show the thinking as ended. Where the prompt opens it, the
    model is in the midst of it; else it may open it or answer at once, as many models do that
    think only where they are asked to. A prompt without control tokens is no chat: it thinks only
    where it ends within an open ``<think>``.

    It depends on nothing but the prompt's ids, so that a continuation, which brings those instead
    of messages, gets the same answer.

    Args:
        prompt: int32 token ids, little endian.
    """
    source, end = text_model.template_source, text_model.token_id(THINK_END)
    if source is None or THINK_END not in source or end is None:
        return Thinking()
    ids = np.frombuffer(prompt, "<i4")
    begin = text_model.token_id(THINK_BEGIN)
    control = [number for number in text_model.special_ids if number not in (begin, end)]
    turn = _last(ids[1:], control)  # the first token may only say that a text begins
    opened, ended = _last(ids[1:], [] if begin is None else [begin]), _last(ids[1:], [end])
    if max(turn, opened) < 0 or ended > max(turn, opened):
        return Thinking()
    after = end.to_bytes(4, "little")
    if opened > turn or begin is None:
        return Thinking(after)
    return Thinking(after, begin.to_bytes(4, "little"))


def _last(ids: np.ndarray[tuple[int], np.dtype[np.int32]], wanted: list[int]) -> int:
    """Where one of these ids stands last, or -1."""
    (places,) = np.isin(ids, wanted).nonzero()
    return int(places[-1]) if len(places) else -1
