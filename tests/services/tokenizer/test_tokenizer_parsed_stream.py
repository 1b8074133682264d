"""An answer that may have one call ends with it, and a call that is not allowed is content."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.tokenizer.chat_templates import CHATML
from support.tokenizer.grammar_follower import tokenizer_of
from support.tokenizer.output.replay import merged
from support.tokenizer.output.written import written

from penstock.protocol.ownership.choice import Choice
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.requests import OutputFormat
from penstock.protocol.wire.messages.tokens import Content, End, EndReason, Released
from penstock.services.tokenizer.chat_template import ChatTemplate
from penstock.services.tokenizer.output.families import FAMILIES
from penstock.services.tokenizer.parsed_stream import ParsedStream
from penstock.services.tokenizer.reading import reading_of
from penstock.services.tokenizer.text_model import TextModel

FAMILY = FAMILIES["json_tags"]
TOOLS = msgspec.json.encode(
    [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
)
FIRST, BOTH = (written(FAMILY, [(name, {"a": "ü"}) for name in names]) for names in ("f", "fg"))


@pytest.fixture(scope="module")
def model() -> TextModel:
    tokenizer, _, _ = tokenizer_of(FAMILY.name, True)
    return TextModel(tokenizer, ChatTemplate(CHATML, {}, path=Path("template")))


def choice_of(model: TextModel, **output: Any) -> Choice:
    reading = reading_of(model, OutputFormat(TOOLS, **output), b"", skips_special=True)
    assert reading is not None
    return Choice(ParsedStream(model, SamplingParams(), b"", reading, reading.parser(1, 0)))


def ids_of(model: TextModel, text: str) -> array[int]:
    return array("i", model.encode(text, add_special_tokens=False))


def in_parts(choice: Choice, ids: array[int], size: int) -> tuple[list[Content], int, End | None]:
    """What comes of tokens in rows of so many, how many of them count, and the end."""
    contents, used = list[Content](), 0
    for begin in range(0, len(ids), size):
        content, tokens, end = choice.push(memoryview(ids)[begin : begin + size], None)
        contents.append(content)
        used += len(tokens)
        if end is not None:
            return contents, used, end
    return contents, used, None


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_an_answer_without_parallel_calls_ends_with_its_first_one(
    model: TextModel, size: int
) -> None:
    ids, whole = ids_of(model, "So. " + BOTH + " Done."), len(ids_of(model, "So. " + FIRST))
    contents, used, end = in_parts(choice_of(model, parallel=False), ids, size)
    assert end == End(0, EndReason.STOP)
    closing = len(ids_of(model, "\n</tool_call>"))
    assert whole - closing <= used <= whole
    opened = [event for event in merged(contents) if event[0] == "call"]
    assert [event[3] for event in opened] == ["f"]
    assert merged(contents)[-1] == ("arguments", 0, '{"a": "ü"}')
    _, used, end = in_parts(choice_of(model), ids, size)
    assert (used, end) == (len(ids), None)


def test_who_goes_on_with_an_answer_that_had_its_only_call_ends_it_at_once(
    model: TextModel,
) -> None:
    ids = ids_of(model, BOTH)
    contents, used, _ = in_parts(choice_of(model, parallel=False), ids, 1)
    for place in range(len(ids)):
        survivor = choice_of(model, parallel=False)
        before = survivor.replay(memoryview(ids)[:place], Released())
        after, more, end = in_parts(survivor, ids[place:], 4)
        assert end == End(0, EndReason.STOP)
        assert more == max(0, used - place)
        assert merged([before, *after]) == merged(contents)


def test_a_call_of_a_tool_that_is_not_allowed_is_content(model: TextModel) -> None:
    ids = ids_of(model, BOTH)
    contents, _, _ = in_parts(choice_of(model, allowed=["g"]), ids, 2)
    events = merged(contents)
    assert [event[3] for event in events if event[0] == "call"] == ["g"]
    assert events[0] == ("text", FIRST)
