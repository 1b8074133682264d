"""The grammar of calls takes what each family writes, and what breaks its form is not allowed."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import pytest
from support.tokenizer.grammar_follower import ENCODED, Follower, takes, tokenizer_of
from support.tokenizer.output.written import written

from penstock.protocol.grammar.request import Grammar
from penstock.protocol.wire.messages.requests import OutputFormat, ToolMode
from penstock.services.tokenizer.output.families import FAMILIES
from penstock.services.tokenizer.output.family import ArgumentForm, Family
from penstock.services.tokenizer.output.machine import Vocabulary
from penstock.services.tokenizer.prompt_error import PromptError
from penstock.services.tokenizer.thinking import Thinking
from penstock.services.tokenizer.tool_grammar import tool_grammar, within_budget

pytest.importorskip("llguidance")
WEATHER = ("get_weather", {"city": "Zürich", "days": 3, "unit": "C"})
WITH_GRAMMAR = [one for one in FAMILIES.values() if one.envelope is not None]
AS_TOKENS = pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
EVERY = pytest.mark.parametrize("family", WITH_GRAMMAR, ids=lambda family: family.name)


@functools.cache
def required(family: Family, as_tokens: bool) -> Follower:
    return Follower(family, as_tokens)


@AS_TOKENS
@EVERY
def test_calls_of_each_family_are_taken_whole(family: Family, as_tokens: bool) -> None:
    follower = required(family, as_tokens)
    assert follower.takes(written(family, [WEATHER]))
    assert family.envelope is not None
    if family.envelope.separator is not None:
        assert follower.takes(written(family, [WEATHER, ("now", {}), WEATHER]))


@AS_TOKENS
@EVERY
def test_what_is_no_call_is_not_taken(family: Family, as_tokens: bool) -> None:
    follower = required(family, as_tokens)
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
    follower = required(family, as_tokens)
    name = "get_weather"
    assert follower.takes(written(family, [(name, {"city": "Oslo"})]))
    assert not follower.takes(written(family, [(name, {"days": 3})]))
    assert not follower.takes(written(family, [(name, {"city": "Oslo", "days": 1.5})]))
    assert not follower.takes(written(family, [(name, {"city": "Oslo", "unit": "K"})]))


@EVERY
@pytest.mark.parametrize(
    ("keys", "as_tokens"),
    [
        pytest.param("ab", True, id="two-tokens"),
        pytest.param("abc", False, id="three-text"),
        pytest.param("abc", True, id="three-tokens", marks=pytest.mark.slow),
        pytest.param("ab", False, id="two-text", marks=pytest.mark.slow),
    ],
)
def test_several_arguments_may_be_texts(family: Family, as_tokens: bool, keys: str) -> None:
    schema = {"type": "object", "properties": {key: {"type": "string"} for key in keys}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for mode in ("required", "auto"):
        follower = Follower(family, as_tokens, mode, tools=msgspec.json.encode([tool]))  # type: ignore[arg-type]
        if follower.grammar is None:
            continue
        for value in ("Zürich", "", "a <b>\nc < d</b>", ">\n<", "<" * 9):
            call = ("f", dict.fromkeys(keys, value))
            assert follower.takes(written(family, [call]))
        assert family.envelope is not None
        if family.envelope.separator is not None:
            assert follower.takes(written(family, [call, ("f", {"b": "x"}), call, call]))


@EVERY
def test_an_answer_is_free_until_a_call_begins_where_calls_have_a_token_of_their_own(
    family: Family,
) -> None:
    follower = Follower(family, True, "auto")
    if follower.grammar is None:
        assert family.channels or not family.marks or not _begins_with_mark(family)
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


BEHIND_THINKING = pytest.mark.parametrize("opened", [True, False], ids=["opened", "may open"])
"""Whether the prompt has opened the thinking."""
THOUGHT = "hm</think>"


class Thinker(Follower):
    """Follows answers of a model that thinks within a budget of three tokens."""

    def __init__(
        self, opened: bool, mode: ToolMode, *, before: str | None = None, **output: Any
    ) -> None:
        super().__init__(FAMILIES["json_tags"], True, mode, **output)
        added = self.vocabulary.added
        start, end = (added[mark].to_bytes(4, "little") for mark in ("<think>", "</think>"))
        thought = Thinking(end, b"" if opened else start)
        self.grammar = within_budget(3, thought, self.grammar)
        self._before = before if before is not None else "" if opened else "<think>"

    def takes(self, text: str) -> bool:
        return super().takes(self._before + text)


@BEHIND_THINKING
def test_calls_behind_a_budget_of_thinking_keep_to_their_form(opened: bool) -> None:
    family = FAMILIES["json_tags"]
    call, other = (written(family, [(name, {"city": "Oslo"})]) for name in ("get_weather", "now"))
    untrue = written(family, [("get_weather", {"town": "Oslo"})])
    auto = Thinker(opened, "auto")
    assert auto.takes(THOUGHT + "It is warm, I think.")
    assert auto.takes(THOUGHT + "I look it up. " + call + "\n" + other)
    assert auto.takes(THOUGHT + untrue)
    assert not auto.takes("hmmm" + THOUGHT)
    assert not auto.takes(THOUGHT + call.replace("weather", "wether"))
    assert not auto.takes(THOUGHT + call + "Done.")
    strict = Thinker(opened, "auto", strict=["get_weather"])
    assert strict.takes(THOUGHT + call)
    assert not strict.takes(THOUGHT + untrue)
    allowed = Thinker(opened, "auto", allowed=["get_weather"])
    assert allowed.takes(THOUGHT + call)
    assert not allowed.takes(THOUGHT + other)
    alone = Thinker(opened, "auto", parallel=False)
    assert alone.takes(THOUGHT + "So: " + call)
    assert not alone.takes(THOUGHT + call + "\n" + other)
    required = Thinker(opened, "required")
    assert required.takes(THOUGHT + call)
    assert not required.takes(THOUGHT + untrue)
    assert not required.takes(THOUGHT + "It is warm.")


@BEHIND_THINKING
def test_json_or_calls_may_stand_behind_a_budget_of_thinking(opened: bool) -> None:
    content = Grammar("json_object", param="response_format")
    either = Thinker(opened, "auto", content=content)
    assert either.takes(THOUGHT + '{"a": 1}')
    assert either.takes(THOUGHT + written(FAMILIES["json_tags"], [WEATHER]))
    assert not either.takes(THOUGHT + "It is warm.")


def test_an_answer_that_begins_without_thinking_cannot_think_later() -> None:
    auto = Thinker(False, "auto", before="")
    assert auto.takes("It is warm.")
    assert auto.takes(written(FAMILIES["json_tags"], [WEATHER]))
    assert not auto.takes("Well, <think>" + THOUGHT)
    assert not auto.takes(written(FAMILIES["json_tags"], [("get_wether", {})]))


def test_a_vocabulary_without_the_newer_mark_has_calls_in_an_array() -> None:
    family = FAMILIES["json_array_mistral"]
    plain, ready, vocabulary = tokenizer_of(family.name, True)
    added = {text: number for text, number in vocabulary.added.items() if text != "[ARGS]"}
    for mode in ("required", "auto"):
        grammar = tool_grammar(family, Vocabulary(added), OutputFormat(ENCODED, mode), "function")
        assert grammar is not None
        call = '{"name": "now", "arguments": {}}'
        assert takes(grammar, plain, ready, f"[TOOL_CALLS][{call}, {call}]")
        assert not takes(grammar, plain, ready, "[TOOL_CALLS]now[ARGS]{}")
