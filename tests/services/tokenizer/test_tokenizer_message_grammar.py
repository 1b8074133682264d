"""Answers in the messages of Kimi K3, Inkling and Muse: thinking and words to the user in messages
of their own, and calls or words that keep to a form where the request asks for one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.tokenizer.grammar_follower import ENCODED, takes, tokenizer_of
from support.tokenizer.output.written import written
from support.tokenizer.prepared_grammars import grammar_of

from penstock.protocol.grammar.request import from_response_format
from penstock.protocol.wire.messages.requests import OutputFormat, ToolMode
from penstock.services.tokenizer.chat_template import ChatTemplate
from penstock.services.tokenizer.output.families import FAMILIES
from penstock.services.tokenizer.prompt_error import PromptError
from penstock.services.tokenizer.text_model import TextModel
from penstock.services.tokenizer.thinking import begins_in_reasoning

JSON = from_response_format({"type": "json_object"})
STRICT = OutputFormat(ENCODED, strict=["get_weather"])
OPENED = {
    "kimi_channels": ("<|open|>think<|sep|>", "<|close|>think<|sep|><|open|>response<|sep|>"),
    "inkling": ("<|message_model|><|content_thinking|>", "<|end_message|><|message_model|>"),
    "muse": ("<|start|>assistant to=self<|message|>", "<|eom|><|start|>assistant"),
}


@pytest.mark.parametrize("name", OPENED)
def test_a_prompt_that_ends_within_thinking_is_known_and_leaves_an_answer_free(name: str) -> None:
    tokenizer, _, _ = tokenizer_of(name, True)
    template = ChatTemplate("{{ tools }}", {}, path=Path("template"))
    model = TextModel(tokenizer, template, parsers=(name, "auto"))
    assert model.form.family is FAMILIES[name]
    opened, closed = OPENED[name]
    for text, within in (
        (opened, True),
        (opened + "Hm", True),
        (opened + "Hm. " * 500, True),
        (opened + "Hm" + closed, False),
        ("Hm. " * 500, False),
    ):
        ids = model.encode(text, add_special_tokens=False)
        assert begins_in_reasoning(model, ids, FAMILIES[name]) is within
    assert grammar_of(model, output=OutputFormat(ENCODED), prompt=opened) is None


BUDGETED: dict[str, tuple[str, str, str, list[str]]] = {
    "kimi_channels": (
        "",
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        ["<|open|>response<|sep|>Yes.<|close|>response<|sep|>", '<|open|>call tool="f"<|sep|>'],
    ),
    "inkling": (
        "<|message_model|>",
        "<|content_thinking|>",
        "<|end_message|>",
        ["<|content_text|>Yes.<|end_message|>", "f<|content_invoke_tool_json|>{}<|end_message|>"],
    ),
    "muse": (
        "<|start|>assistant",
        " to=self<|message|>",
        "<|eom|>",
        [" to=user<|message|>Yes.<|eom|>", " to=f<|message|><atem:function_calls><|eom|>"],
    ),
}


@pytest.mark.parametrize("name", BUDGETED)
def test_a_budget_holds_thinking_alone_in_every_kind_of_channels(name: str) -> None:
    tokenizer, ready, _ = tokenizer_of(name, True)
    template = ChatTemplate("{{ tools }}", {}, path=Path("template"))
    model = TextModel(tokenizer, template, parsers=(name, "auto"))
    begin, opened, closed, answers = BUDGETED[name]

    def follows(text: str, budget: int = 3, prompt: str = "x" + begin) -> bool:
        output = OutputFormat(ENCODED, thinking_budget=budget)
        grammar = grammar_of(model, output=output, prompt=prompt)
        assert grammar is not None
        return takes(grammar, tokenizer, ready, text)

    for answer in answers:
        assert follows(answer)
        assert follows(opened + "abc" + closed + begin + answer)
        assert not follows(opened + "abcd" + closed + begin + answer)
        assert not follows(opened + "a" + closed + begin + opened + "b" + closed + begin + answer)
        assert not follows(answer + begin + opened)
        assert not follows(opened + closed, budget=0)
        begun = "x" + begin + opened + "Hm"
        assert follows("abc" + closed + begin + answer, prompt=begun)
        assert not follows("abcd" + closed + begin + answer, prompt=begun)
        assert follows(closed + begin + answer, 0, begun)


@pytest.mark.parametrize("name", BUDGETED)
def test_calls_that_are_a_must_come_behind_thinking_in_every_kind_of_channels(name: str) -> None:
    tokenizer, ready, _ = tokenizer_of(name, True)
    template = ChatTemplate("{{ tools }}", {}, path=Path("template"))
    model = TextModel(tokenizer, template, parsers=(name, "auto"))
    begin, opened, closed, answers = BUDGETED[name]
    family = FAMILIES[name]
    call, untrue = (written(family, [("get_weather", {key: "Oslo"})]) for key in ("city", "town"))

    def follows(text: str, prompt: str = "x" + begin, budget: int | None = None) -> bool:
        output = OutputFormat(ENCODED, "required", thinking_budget=budget)
        grammar = grammar_of(model, output=output, prompt=prompt)
        assert grammar is not None
        return takes(grammar, tokenizer, ready, text)

    begun = "x" + begin + opened + "Hm"
    behind = closed + begin
    assert follows(call)
    assert follows(opened + "Hmmmm" + behind + call)
    assert follows("mmm" + behind + call, begun)
    for text in (untrue, answers[0], opened + "Hm" + behind, "Hm" + call):
        assert not follows(text)
    assert not follows(call, begun)
    assert follows(opened + "abc" + behind + call, budget=3)
    assert not follows(opened + "abcd" + behind + call, budget=3)
    assert not follows("abcd" + behind + call, begun, 3)
    assert follows(behind + call, begun, 0)
    assert not follows(opened + behind + call, budget=0)
    if name == "kimi_channels":
        reply, ended = "<|open|>response<|sep|>", "<|close|>response<|sep|>"
        assert follows(ended + call, "x" + reply)
        assert follows("mmm" + behind + reply + ended + call, begun)


SAID = {
    "kimi_channels": ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    "inkling": ("<|content_text|>", "<|end_message|>"),
    "muse": (" to=user<|message|>", "<|eom|>"),
}
"""What begins and ends words to the user."""
GRAMMARS: list[dict[str, Any]] = [
    {"output": STRICT},
    {"output": OutputFormat(), "form": JSON},
    {"output": OutputFormat(ENCODED), "form": JSON},
]


def follower(name: str, prompt: str, **asked: Any) -> Callable[[str], bool]:
    """Whether a text may be the answer to a prompt."""
    tokenizer, ready, _ = tokenizer_of(name, True)
    template = ChatTemplate("{{ tools }}", {}, path=Path("template"))
    model = TextModel(tokenizer, template, parsers=(name, "auto"))
    grammar = grammar_of(model, prompt=prompt, **asked)
    assert grammar is not None
    return lambda text: takes(grammar, tokenizer, ready, text)


@pytest.mark.parametrize("name", SAID)
def test_a_strict_tool_is_called_by_its_schema_or_words_come_instead(name: str) -> None:
    begin, opened, closed, _ = BUDGETED[name]
    said, unsaid = SAID[name]
    family = FAMILIES[name]
    call, untrue = (written(family, [("get_weather", {key: "Oslo"})]) for key in ("city", "town"))
    two = written(family, [("get_weather", {"city": "Oslo"}), ("now", {})])
    thought, words = opened + "Hm." + closed + begin, said + "I look." + unsaid
    follows = follower(name, "x" + begin, output=STRICT)
    for answer in (call, two, words, said + "I look."):
        assert follows(answer)
        assert follows(thought + answer)
        assert follows(thought + words + begin + answer)
    for wrong in ("", "I look.", untrue, thought, thought + untrue, words + begin + untrue):
        assert not follows(wrong)
    begun = follower(name, "x" + begin + opened + "Hm", output=STRICT)
    assert begun("." + closed + begin + call)
    assert begun("." + closed + begin + words)
    assert not begun(call)
    assert not begun("." + closed + begin + untrue)
    one = follower(
        name, "x" + begin, output=OutputFormat(ENCODED, strict=["get_weather"], parallel=False)
    )
    assert one(call)
    assert not one(two)


@pytest.mark.parametrize("name", SAID)
def test_a_response_format_holds_for_the_words_to_the_user(name: str) -> None:
    begin, opened, closed, _ = BUDGETED[name]
    said, unsaid = SAID[name]
    call = written(FAMILIES[name], [("get_weather", {"city": "Oslo"})])
    thought = opened + "Hm." + closed + begin
    for tools in (b"", ENCODED):
        follows = follower(name, "x" + begin, output=OutputFormat(tools), form=JSON)
        for answer in (said + '{"a": 1}', said + '{"a": 1}' + unsaid):
            assert follows(answer)
            assert follows(thought + answer)
        assert follows(thought + call) == bool(tools)
        for wrong in (said + "I look.", '{"a": 1}', said + '{"a": 1}.', thought):
            assert not follows(wrong)
        assert not follows(said + "I look." + unsaid + begin + said + '{"a": 1}')
        assert not follows(said + '{"a": 1}' + unsaid + begin + said + '{"a": 1}')
        begun = follower(name, "x" + begin + opened, output=OutputFormat(tools), form=JSON)
        assert begun("Hm" + closed + begin + said + '{"a": 1}' + unsaid)
        assert not begun("Hm" + closed + begin + said + "a")


@pytest.mark.parametrize("name", SAID)
def test_words_that_the_prompt_has_begun_go_on_as_they_must(name: str) -> None:
    begin = BUDGETED[name][0]
    said, unsaid = SAID[name]
    call = written(FAMILIES[name], [("get_weather", {"city": "Oslo"})])
    untrue = call.replace("city", "town")
    words = follower(name, "x" + begin + said, output=STRICT)
    for answer in ("I look.", "I look." + unsaid, "I look." + unsaid + begin + call):
        assert words(answer)
    assert words(unsaid + begin + call)
    assert not words("I look." + unsaid + begin + untrue)
    assert not words(call)
    for tools in (b"", ENCODED):
        json = follower(name, "x" + begin + said, output=OutputFormat(tools), form=JSON)
        assert json('{"a": 1}')
        assert json('{"a": 1}' + unsaid)
        assert not json("I look.")
        assert not json(said + '{"a": 1}')
        assert json(unsaid + begin + call) == bool(tools)
    long = follower(name, begin + said + "So. " * 500, output=OutputFormat(), form=JSON)
    assert long('{"a": 1}')
    must = follower(name, "x" + begin + said, output=OutputFormat(ENCODED, "required"))
    assert must(unsaid + begin + call)
    assert not must("I look." + unsaid + begin + call)
    assert not must("I look." + unsaid)


@pytest.mark.parametrize("asked", GRAMMARS, ids=["strict", "format", "format with tools"])
@pytest.mark.parametrize("name", SAID)
def test_what_words_and_calls_are_held_to_holds_behind_a_budget(
    name: str, asked: dict[str, Any]
) -> None:
    begin, opened, closed, _ = BUDGETED[name]
    said = SAID[name][0] + '{"a": 1}'
    prompts = {
        "": follower_with_budget(name, "x" + begin, 3, asked),
        opened: follower_with_budget(name, "x" + begin + opened, 3, asked),
    }
    for given, follows in prompts.items():
        whole = opened.removeprefix(given)
        assert follows(whole + "abc" + closed + begin + said)
        assert not follows(whole + "abcd" + closed + begin + said)
        twice = whole + "a" + closed + begin + opened + "b" + closed + begin + said
        assert not follows(twice)
    assert prompts[""](said)
    none = follower_with_budget(name, "x" + begin, 0, asked)
    assert none(said)
    assert not none(opened + closed + begin + said)


def follower_with_budget(
    name: str, prompt: str, budget: int, asked: dict[str, Any]
) -> Callable[[str], bool]:
    """``follower`` with so many tokens of thinking."""
    given: OutputFormat = asked["output"]
    output = OutputFormat(given.tools, strict=given.strict, thinking_budget=budget)
    return follower(name, prompt, **{**asked, "output": output})


def test_the_end_of_a_message_may_stand_behind_what_kimi_says_and_calls() -> None:
    end = "<|close|>message<|sep|>"
    call = written(FAMILIES["kimi_channels"], [("get_weather", {"city": "Oslo"})])
    said, unsaid = SAID["kimi_channels"]
    for output in (STRICT, OutputFormat(ENCODED, "required")):
        follows = follower("kimi_channels", "x", output=output)
        assert follows(call + end)
        assert follows(said + unsaid + call + end)
        assert not follows(end)
    assert follower("kimi_channels", "x", output=STRICT)(said + "Yes." + unsaid + end)
    json = follower("kimi_channels", "x" + said, output=OutputFormat(), form=JSON)
    assert json('{"a": 1}' + unsaid + end)


@pytest.mark.parametrize("name", ["user", "self"])
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_tool_whose_name_is_a_recipient_of_muse_is_refused_by_its_name(
    name: str, mode: ToolMode
) -> None:
    def model(family: str) -> TextModel:
        tokenizer, _, _ = tokenizer_of(family, True)
        template = ChatTemplate("{{ tools }}", {}, path=Path("template"))
        return TextModel(tokenizer, template, parsers=(family, "auto"))

    declared = [{"type": "function", "function": {"name": one}} for one in ("users", name)]
    tools = msgspec.json.encode(declared)
    muse = model("muse")
    with pytest.raises(PromptError, match=f"cannot call a tool of the name '{name}'") as refused:
        grammar_of(muse, output=OutputFormat(tools, mode))
    assert refused.value.param == "tools"
    grammar_of(muse, output=OutputFormat(tools, "none"))
    grammar_of(muse, output=OutputFormat(msgspec.json.encode(declared[:1]), mode))
    grammar_of(model("inkling"), output=OutputFormat(tools, mode))
