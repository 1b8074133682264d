"""What has come of an answer is held in as few parts as it needs."""

from __future__ import annotations

import itertools

import pytest

from penstock.client.answers import Answer
from penstock.client.sink import RowExtras
from penstock.protocol.wire.messages.tokens import (
    Event,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallOpened,
)

PARTS: tuple[str | Event, ...] = (
    "a",
    Text("b"),
    Reasoning("c"),
    ToolCallOpened(0, "id", "name"),
    ToolArguments(0, "d"),
    ToolArguments(1, "e"),
)


def answer_of(parts: tuple[str | Event, ...]) -> Answer:
    answer = Answer()
    for part in parts:
        if isinstance(part, str):
            answer.add_text(part)
        else:
            answer.add("", RowExtras(events=[part]))
    return answer


def told(answer: Answer) -> tuple[str, str, list[tuple[str, str, str]]]:
    opened = {0: ("id", "name"), 1: ("id", "name")}
    return answer.text, answer.reasoning, answer.calls(opened)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_joined_parts_tell_the_same_and_none_is_of_the_channel_of_its_neighbour(count: int) -> None:
    for parts in itertools.product(PARTS, repeat=count):
        answer = answer_of(parts)
        before = told(answer)
        answer.join()
        assert told(answer) == before, parts
        held = [Text(part) if isinstance(part, str) else part for part in answer.content]
        for one, other in itertools.pairwise(held):
            opens = isinstance(one, ToolCallOpened) or isinstance(other, ToolCallOpened)
            same = type(one) is type(other)
            if same and isinstance(one, ToolArguments) and isinstance(other, ToolArguments):
                same = one.index == other.index
            assert opens or not same, (parts, held)
