"""The grammar of calls takes what each family writes, and what breaks its form is not allowed."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parent / "output"))
from written import written

from penstock.protocol.grammar.compiler import compile_grammar, make_tokenizer
from penstock.protocol.grammar.request import Grammar
from penstock.protocol.wire.messages.requests import OutputFormat, ToolMode
from penstock.services.tokenizer.output.families import FAMILIES
from penstock.services.tokenizer.output.family import ArgumentForm, Family
from penstock.services.tokenizer.output.machine import Vocabulary
from penstock.services.tokenizer.prompt_error import PromptError
from penstock.services.tokenizer.tool_grammar import Strictness, tool_grammar

pytest.importorskip("llguidance")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "unit": {"enum": ["C", "F"]},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
]
ENCODED = msgspec.json.encode(TOOLS)
WEATHER = ("get_weather", {"city": "Zürich", "days": 3, "unit": "C"})
END = "<|end|>"
WITH_GRAMMAR = [one for one in FAMILIES.values() if one.envelope is not None]
AS_TOKENS = pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
EVERY = pytest.mark.parametrize("family", WITH_GRAMMAR, ids=lambda family: family.name)


@cache
def tokenizer_of(name: str, as_tokens: bool) -> tuple[Tokenizer, Any, Vocabulary]:
    """Bytes, and the family's marks as tokens of their own."""
    family = FAMILIES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({one: number for number, one in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    marks = [text for text in family.marks.values() if text.strip()] if as_tokens else []
    made.add_tokens([AddedToken(text, special=True) for text in (*marks, END)])
    added = {one.content: number for number, one in made.get_added_tokens_decoder().items()}
    size = made.get_vocab_size(with_added_tokens=True)
    ready = make_tokenizer(made.to_str(), size, [added[END]])
    return made, ready, Vocabulary(added)


class Follower:
    """Follows a grammar through texts."""

    def __init__(
        self,
        family: Family,
        as_tokens: bool,
        mode: ToolMode = "required",
        strictness: Strictness = "function",
        **output: Any,
    ) -> None:
        self._plain, self._ready, vocabulary = tokenizer_of(family.name, as_tokens)
        format = OutputFormat(ENCODED, mode, **output)
        self.grammar = tool_grammar(family, vocabulary, format, strictness)

    def takes(self, text: str) -> bool:
        """Whether the whole text may be an answer."""
        assert self.grammar is not None
        ids = self._plain.encode(text, add_special_tokens=False).ids
        starts = self.grammar.starts_after()
        if starts:
            assert ids[0] in starts
            ids = ids[1:]
        matcher = compile_grammar(self.grammar, self._ready)
        for token in ids:
            if not _allows(matcher, token):
                return False
            matcher.consume_token(token)
        return bool(matcher.is_accepting())


def _allows(matcher: Any, token: int) -> bool:
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return bool(mask[token // 8] >> token % 8 & 1)


@AS_TOKENS
@EVERY
def test_calls_of_each_family_are_taken_whole(family: Family, as_tokens: bool) -> None:
    follower = Follower(family, as_tokens)
    assert follower.takes(written(family, [WEATHER]))
    assert family.envelope is not None
    if family.envelope.separator is not None:
        assert follower.takes(written(family, [WEATHER, ("now", {}), WEATHER]))


@AS_TOKENS
@EVERY
def test_what_is_no_call_is_not_taken(family: Family, as_tokens: bool) -> None:
    follower = Follower(family, as_tokens)
    call = written(family, [WEATHER])
    assert not follower.takes("")
    assert not follower.takes("It is warm.")
    assert not follower.takes(call[:-2])
    assert not follower.takes(call + "!")
    assert not follower.takes(written(family, [("get_wether", {"city": "Oslo"})]))


@EVERY
def test_one_call_is_the_most_where_parallel_ones_are_not_wanted(family: Family) -> None:
    follower = Follower(family, True, parallel=False)
    assert follower.takes(written(family, [WEATHER]))
    assert not follower.takes(written(family, [WEATHER, WEATHER]))


@EVERY
def test_a_named_tool_is_the_only_one_that_may_be_called(family: Family) -> None:
    follower = Follower(family, True, allowed=["get_weather"])
    assert follower.takes(written(family, [WEATHER]))
    assert not follower.takes(written(family, [("now", {})]))


@AS_TOKENS
@EVERY
def test_the_arguments_keep_to_the_schema_where_a_call_is_a_must(
    family: Family, as_tokens: bool
) -> None:
    follower = Follower(family, as_tokens)
    name = "get_weather"
    assert follower.takes(written(family, [(name, {"city": "Oslo"})]))
    assert not follower.takes(written(family, [(name, {"days": 3})]))
    assert not follower.takes(written(family, [(name, {"city": "Oslo", "days": 1.5})]))
    assert not follower.takes(written(family, [(name, {"city": "Oslo", "unit": "K"})]))


@EVERY
def test_an_answer_is_free_until_a_call_begins_where_calls_have_a_token_of_their_own(
    family: Family,
) -> None:
    follower = Follower(family, True, "auto")
    if follower.grammar is None:
        assert not family.marks or not _begins_with_mark(family)
        return
    assert follower.grammar.may_end
    assert follower.takes(written(family, [WEATHER]))
    assert not follower.takes(written(family, [("get_wether", {})]))
    if family.envelope is not None and family.envelope.form is ArgumentForm.JSON:
        # Names and form are held to, schemas are not unless that is asked for.
        anything = written(family, [("get_weather", {"other": [1]})])
        assert follower.takes(anything)
        assert not Follower(family, True, "auto", "parameter").takes(anything)
        assert not Follower(family, True, "auto", strict=["get_weather"]).takes(anything)
    assert Follower(family, True, "auto", "auto").grammar is None
    assert Follower(family, False, "auto").grammar is None


def _begins_with_mark(family: Family) -> bool:
    assert family.envelope is not None
    beginning = family.envelope.open or family.envelope.before_name
    return any(beginning.startswith(mark) for mark in family.marks.values() if mark)


def test_a_strict_schema_that_cannot_be_enforced_is_refused_by_name() -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    format = OutputFormat(msgspec.json.encode([tool]), "auto", strict=["f"])
    family = FAMILIES["json_tags"]
    with pytest.raises(PromptError, match=r"schema of 'f', which is strict.*not"):
        tool_grammar(family, tokenizer_of(family.name, True)[2], format, "function")
    free = msgspec.structs.replace(format, strict=[], mode="required")
    assert isinstance(
        tool_grammar(family, tokenizer_of(family.name, True)[2], free, "function"), Grammar
    )
