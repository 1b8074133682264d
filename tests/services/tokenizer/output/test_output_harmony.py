from __future__ import annotations

import pytest
from support.tokenizer.output.replay import Case, call, check, every_cut, reasoning, text

from penstock.services.tokenizer.output.families import FAMILIES

ROME, NOW = call("weather", {"city": "Rome"}), call("now")
JSON = '{"city": "Rome"}'
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|>"
START = "<|start|>assistant"
TO = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
CASES = [
    Case("", []),
    Case("plain", [text("plain")]),
    Case("<|channel|>final<|message|>Hello.<|return|>", [text("Hello.")]),
    Case("<|channel|>final<|message|>Hello.", [text("Hello.")]),
    Case(ANALYSIS + START + "<|channel|>final<|message|>Hi <b", [reasoning("Hm."), text("Hi <b")]),
    Case(TO + JSON + "<|call|>", [ROME]),
    Case(TO + JSON, [ROME]),
    Case(ANALYSIS + START + TO + JSON + "<|call|>", [reasoning("Hm."), ROME]),
    Case(
        "<|channel|>commentary<|message|>I look.<|end|>" + START + TO + JSON + "<|call|>",
        [text("I look."), ROME],
    ),
    Case(TO + JSON + "<|call|>" + START + TO + JSON + "<|call|>", [ROME, ROME]),
    # The recipient stands in the part of the role.
    Case(
        " to=functions.weather<|channel|>commentary <|constrain|>json<|message|>" + JSON, [ROME]
    ),
    Case(
        ANALYSIS + START + " to=functions.now<|channel|>commentary<|message|>{}<|call|>",
        [reasoning("Hm."), NOW],
    ),
    Case("<|channel|>analysis to=functions.now code<|message|>{}<|call|>", [NOW]),
    # Parts are missing, come twice or in another order.
    Case("<|channel|>commentary to=functions.now<|call|>", [NOW]),
    Case("<|channel|>commentary to=functions.weather json<|message|>" + JSON, [ROME]),
    Case("<|channel|>commentary to=functions.weather " + JSON + "<|call|>", [ROME]),
    Case(
        "<|channel|>commentary <|constrain|>json to=functions.weather<|message|>" + JSON, [ROME]
    ),
    Case("<|channel|>commentary<|channel|>analysis<|message|>Hm.<|end|>", [reasoning("Hm.")]),
    Case("<|channel|>final Hello.", [text(" Hello.")]),
    Case("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Hi",
         [reasoning("Hm."), text("Hi")]),
    Case("<|channel|>analysis<|message|>Hm." + START + "<|channel|>final<|message|>Hi",
         [reasoning("Hm."), text("Hi")]),
    Case("<|message|>Hi", [text("Hi")]),
    Case(START + "<|message|>Hi<|end|>", [text("Hi")]),
    Case(START + START + "<|channel|>final<|message|>Hi", [text("assistantHi")]),
    Case("<|channel|>secret<|message|>Hi", [text("secret<|message|>Hi")]),
    Case("Hi<|end|>", [text("Hi")]),
    Case("<|end|><|end|><|return|>", []),
    # Recipients that are no functions.
    Case("<|channel|>analysis to=python code<|message|>1+1<|call|>", [reasoning("1+1")]),
    Case("<|channel|>commentary to=browser.open<|message|>{}<|call|>", [text("{}")]),
    Case("<|channel|>commentary to=now<|message|>{}<|call|>", [NOW]),
    Case("<|channel|>commentary to=weather <|constrain|>json<|message|>" + JSON, [ROME]),
    Case("<|channel|>commentary to=functions.else<|message|>{}<|call|>", [call("else")]),
    # Arguments that are cut or wrong.
    Case(TO + '{"city": "Ro', [call("weather", '{"city": "Ro')]),
    Case(TO + '{"city": <|call|>', [call("weather", {"city": None})]),
    Case(TO + JSON + " so<|end|>", [ROME, text(" so")]),
    Case(TO + JSON + "<|end|>" + START + "<|channel|>final<|message|>Hi", [ROME, text("Hi")]),
    Case(TO + "<|call|>", [call("weather")]),
    Case(TO + '{"city": "a <|x|> }"}<|call|>', [call("weather", {"city": "a <|x|> }"})]),
    Case("Why.<|end|>" + START + "<|channel|>final<|message|>So.",
         [reasoning("Why."), text("So.")], in_reasoning=True),
    Case("never ends", [reasoning("never ends")], in_reasoning=True),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.output[:60])
def test_an_output_gives_its_events_however_it_is_cut(case: Case) -> None:
    check(FAMILIES["harmony"], case)


def test_without_tools_channels_are_told_apart_and_calls_are_content() -> None:
    output = ANALYSIS + START + TO + JSON + "<|call|>"
    for events in every_cut(FAMILIES["harmony"], output, parses_tools=False).values():
        assert events[0] == ("reasoning", "Hm.")
        assert [event[0] for event in events] == ["reasoning", "text"]


def test_without_reasoning_analysis_is_content() -> None:
    output = ANALYSIS + START + "<|channel|>final<|message|>Hi"
    for events in every_cut(FAMILIES["harmony"], output, parses_reasoning=False).values():
        assert events == [("text", "Hm.Hi")]
