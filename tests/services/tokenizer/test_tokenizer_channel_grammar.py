"""Answers of a model with channels: it may think first, and is held to calls only where it must."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tokenizer.grammar_follower import ENCODED, Follower, takes, tokenizer_of
from support.tokenizer.prepared_grammars import grammar_of

from penstock.protocol.grammar.request import Grammar, from_response_format
from penstock.protocol.wire.messages.requests import OutputFormat
from penstock.services.tokenizer.chat_template import ChatTemplate
from penstock.services.tokenizer.output.families import FAMILIES
from penstock.services.tokenizer.prompt_error import PromptError
from penstock.services.tokenizer.text_model import TextModel

HARMONY = FAMILIES["harmony"]
ANALYSIS = "<|channel|>analysis<|message|>Which city? A < b.<|end|><|start|>assistant"
CALL = (
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Oslo"}<|call|>'
)
OTHER_CALL = CALL.replace("city", "town")
FINAL = "<|channel|>final<|message|>It is <b>warm</b>."
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}<|message|>"
    "{{ message['content'] }}<|end|>{% endfor %}{% if tools %}{{ tools }}{% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    "{# <|start|>assistant<|channel|>analysis<|message|> #}"
)
THINKS_IN_TEXT = "{{ messages[0]['content'] }}{% if false %}<think></think>{% endif %}"
BUDGET_WITH_TOOLS = OutputFormat(ENCODED, thinking_budget=3)
JSON = from_response_format({"type": "json_object"})
TURN = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
THINKS = TURN + "<|channel|>analysis<|message|>Hm"
ANSWERS = TURN + "<|channel|>final<|message|>{"


def test_an_answer_is_free_where_a_tool_may_be_called() -> None:
    assert Follower(HARMONY, True, "auto").grammar is None
    assert Follower(HARMONY, True, "auto", "parameter").grammar is None


def test_a_call_that_is_a_must_comes_at_once_or_after_thinking() -> None:
    follower = Follower(HARMONY, True)
    assert follower.takes(CALL)
    assert follower.takes(ANALYSIS + CALL)
    assert follower.takes(ANALYSIS + ANALYSIS + CALL + "<|start|>assistant" + CALL)
    assert not follower.takes("<|start|>assistant" + CALL)
    assert not follower.takes(ANALYSIS + FINAL)
    assert not follower.takes(ANALYSIS + OTHER_CALL)
    assert not follower.takes(ANALYSIS)
    for end in ("<|return|>", "<|call|>"):
        assert not follower.takes(ANALYSIS.replace(" < b.", end) + CALL)


def test_a_strict_tool_is_called_by_its_schema_or_the_answer_is_a_final_message() -> None:
    follower = Follower(HARMONY, True, "auto", strict=["get_weather"])
    assert follower.takes(ANALYSIS + FINAL)
    assert follower.takes(FINAL)
    words = "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"
    assert follower.takes(ANALYSIS + words + ANALYSIS + CALL)
    assert follower.takes(ANALYSIS + CALL)
    assert not follower.takes(ANALYSIS + OTHER_CALL)


@pytest.fixture(scope="module")
def model() -> TextModel:
    tokenizer, _, _ = tokenizer_of("harmony", True)
    return TextModel(tokenizer, ChatTemplate(TEMPLATE, {}, path=Path("template")))


def follows(grammar: Grammar | None, text: str) -> bool:
    assert grammar is not None
    plain, ready, _ = tokenizer_of("harmony", True)
    return takes(grammar, plain, ready, text)


def test_a_response_format_holds_for_the_final_message_alone(model: TextModel) -> None:
    assert model.form.family is HARMONY
    grammar = grammar_of(model, form=JSON)
    final = "<|channel|>final<|message|>"
    assert follows(grammar, final + '{"a": 1}')
    assert follows(grammar, ANALYSIS + final + '{"a": 1}')
    assert not follows(grammar, ANALYSIS + FINAL)
    assert not follows(grammar, '{"a": 1}')


def test_with_tools_a_response_format_allows_calls_too(model: TextModel) -> None:
    grammar = grammar_of(model, output=OutputFormat(ENCODED), form=JSON)
    assert follows(grammar, ANALYSIS + '<|channel|>final<|message|>{"a": 1}')
    assert follows(grammar, ANALYSIS + CALL)
    assert not follows(grammar, FINAL)


def test_thinking_that_the_prompt_has_begun_ends_before_a_call(model: TextModel) -> None:
    required = OutputFormat(ENCODED, "required")
    grammar = grammar_of(model, output=required, prompt=THINKS)
    ended = " of it.<|end|><|start|>assistant"
    assert follows(grammar, ended + CALL)
    assert follows(grammar, ended + ANALYSIS + CALL)
    assert not follows(grammar, CALL)
    assert follows(grammar_of(model, output=required, prompt=TURN), CALL)


def test_behind_the_beginning_of_a_final_message_no_call_can_be_a_must(model: TextModel) -> None:
    with pytest.raises(PromptError, match="continue_final_message") as refused:
        grammar_of(model, output=OutputFormat(ENCODED, "required"), prompt=ANSWERS)
    assert refused.value.param == "messages"
    assert grammar_of(model, output=OutputFormat(ENCODED), prompt=ANSWERS) is None
    assert grammar_of(model, form=JSON, prompt=ANSWERS) == JSON


def thought(words: str) -> str:
    return f"<|channel|>analysis<|message|>{words}<|end|><|start|>assistant"


ROLE_CALL = " to=functions.now<|channel|>commentary json<|message|>{}"
"""A call whose recipient stands in the role."""


@pytest.mark.parametrize("output", [OutputFormat(thinking_budget=3), BUDGET_WITH_TOOLS])
def test_a_budget_holds_thinking_alone_where_the_answer_is_free(
    model: TextModel, output: OutputFormat
) -> None:
    grammar = grammar_of(model, output=output)
    for answer in (FINAL, CALL, ROLE_CALL, CALL[:-8] + "<|end|><|start|>assistant" + FINAL):
        assert follows(grammar, answer)
        assert follows(grammar, thought("abc") + answer)
        assert not follows(grammar, thought("abcd") + answer)
    assert not follows(grammar, thought("a") + thought("b") + FINAL)
    assert not follows(grammar, FINAL + "<|end|><|start|>assistant" + thought("b") + FINAL)
    assert not follows(grammar, "<|channel|>analysis<|message|>abc")


def test_a_budget_counts_on_in_thinking_that_the_prompt_has_begun(model: TextModel) -> None:
    grammar = grammar_of(model, output=OutputFormat(thinking_budget=3), prompt=THINKS)
    assert follows(grammar, "abc<|end|><|start|>assistant" + FINAL)
    assert not follows(grammar, "abcd<|end|><|start|>assistant" + FINAL)
    none = grammar_of(model, output=OutputFormat(thinking_budget=0), prompt=THINKS)
    assert follows(none, "<|end|><|start|>assistant" + FINAL)
    assert not follows(none, "a<|end|><|start|>assistant" + FINAL)


def test_a_budget_of_nothing_leaves_no_thinking(model: TextModel) -> None:
    grammar = grammar_of(model, output=OutputFormat(thinking_budget=0))
    assert follows(grammar, FINAL)
    assert not follows(grammar, thought("") + FINAL)


def test_behind_the_beginning_of_a_final_message_a_budget_allows_no_thinking(
    model: TextModel,
) -> None:
    grammar = grammar_of(model, output=OutputFormat(thinking_budget=3), prompt=ANSWERS)
    assert follows(grammar, "It is warm.")
    assert not follows(grammar, "It is warm.<|end|><|start|>assistant" + thought("a") + FINAL)


def test_calls_and_a_response_format_hold_behind_a_budget(model: TextModel) -> None:
    required = OutputFormat(ENCODED, "required", thinking_budget=3)
    grammar = grammar_of(model, output=required)
    assert follows(grammar, thought("abc") + CALL + "<|start|>assistant" + CALL)
    assert follows(grammar, CALL)
    assert not follows(grammar, thought("abcd") + CALL)
    assert not follows(grammar, thought("a") + thought("b") + CALL)
    assert not follows(grammar, thought("abc") + OTHER_CALL)
    assert not follows(grammar, thought("abc") + FINAL)
    begun = grammar_of(model, output=required, prompt=THINKS)
    assert follows(begun, "abc<|end|><|start|>assistant" + CALL)
    json = grammar_of(model, output=OutputFormat(thinking_budget=3), form=JSON)
    final = '<|channel|>final<|message|>{"a": 1}'
    words = "<|channel|>commentary<|message|>So.<|end|><|start|>assistant"
    assert follows(json, thought("abc") + words + final)
    assert not follows(json, thought("abcd") + final)
    assert not follows(json, thought("abc") + FINAL)


def test_a_budget_is_refused_where_no_token_closes_the_thinking() -> None:
    for family, template, lacks in (
        ("json_tags", THINKS_IN_TEXT, "no token '</think>'"),
        ("harmony", TEMPLATE, "lacks tokens of the channels"),
    ):
        tokenizer, _, _ = tokenizer_of(family, False)
        thinks = TextModel(tokenizer, ChatTemplate(template, {}, path=Path("template")))
        with pytest.raises(PromptError, match=lacks) as refused:
            grammar_of(thinks, output=OutputFormat(thinking_budget=7))
        assert refused.value.param == "thinking_token_budget"
