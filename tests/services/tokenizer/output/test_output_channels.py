"""Channels other than harmony's: Kimi K3, Inkling and Muse."""

from __future__ import annotations

import pytest
from support.tokenizer.output.replay import Case, call, check, every_cut, reasoning, text
from support.tokenizer.output.wire_forms import FORMS

from penstock.services.tokenizer.output.families import FAMILIES

CALLS = [("weather", {"city": "Rome", "days": 3}), ("now", {})]
TWO = [call(*one) for one in CALLS]
ROME, NOW = call("weather", {"city": "Rome"}), call("now")


def opened(channel: str, content: str) -> str:
    return f"<|open|>{channel}<|sep|>{content}<|close|>{channel}<|sep|>"


def argument(kind: str, value: str, key: str = "city") -> str:
    begin = f'<|open|>argument key="{key}"{kind}<|sep|>'
    return f"{begin}{value}<|close|>argument<|sep|>"


def kimi(name: str, *arguments: str) -> str:
    inside = "".join(arguments)
    return f'<|open|>call tool="{name}" index="1"<|sep|>{inside}<|close|>call<|sep|>'


STRING = ' type="string"'
WEATHER = kimi("weather", argument(STRING, "Rome"))
KIMI = [
    Case("", []),
    Case("plain", [text("plain")]),
    Case(
        opened("think", "Hm.") + opened("response", "Yes <b>"), [reasoning("Hm."), text("Yes <b>")]
    ),
    Case(
        "Hm.<|close|>think<|sep|>" + opened("response", "Yes"),
        [reasoning("Hm."), text("Yes")],
        True,
    ),
    Case("Yes<|close|>response<|sep|><|close|>message<|sep|>", [text("Yes")]),
    Case(
        opened("response", "I look.") + FORMS["channels, Kimi K3"].write(CALLS),
        [text("I look."), *TWO],
    ),
    Case("Hm.<|close|>think<|sep|>" + opened("tools", WEATHER), [reasoning("Hm."), ROME], True),
    Case(opened("tools", WEATHER + "\n" + kimi("now")) + "\n", [ROME, NOW]),
    Case(
        kimi("weather", '<|open|>json type="object"<|sep|>{"city": "Rome"}<|close|>json<|sep|>'),
        [ROME],
    ),
    Case(kimi("weather", '<|open|>json<|sep|>{"city": "Rome"}'), [ROME]),
    Case(
        kimi(
            "search",
            argument(STRING, " a\n<b>", "query"),
            argument(' type="object"', '{"x": [1]}', "filters"),
        ),
        [call("search", {"query": " a\n<b>", "filters": {"x": [1]}})],
    ),
    Case(
        kimi("weather", argument(STRING, "7"), argument(' type="number"', "7", "days")),
        [call("weather", {"city": "7", "days": 7})],
    ),
    Case(
        kimi("weather", argument("", "Rome"), argument("", "7", "days")),
        [call("weather", {"city": "Rome", "days": 7})],
    ),
    Case('<|open|>call tool="now"<|sep|><|close|>call<|sep|>', [NOW]),
    # Ends are missing.
    Case(opened("tools", WEATHER.removesuffix("<|close|>call<|sep|>")), [ROME]),
    Case('<|open|>call tool="now" index="1"<|sep|>' + WEATHER, [NOW, ROME]),
    Case(f"<|open|>think<|sep|>Hm.{WEATHER}", [reasoning("Hm."), ROME]),
    Case(
        '<|open|>call tool="weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Ro',
        [call("weather", '{"city": "Ro')],
    ),
    # What is no call is text.
    Case(
        "<|open|>tools<|sep|><|open|>call index", [text("<|open|>tools<|sep|><|open|>call index")]
    ),
    Case("a <|open|> b <|sep|>", [text("a <|open|> b <|sep|>")]),
]


def inkling(body: str, name: str = "weather") -> str:
    return f"<|message_model|>{name}<|content_invoke_tool_json|>{body}<|end_message|>"


SAID = "<|content_text|>I look.<|end_message|>"
THOUGHT = "<|content_thinking|>Hm.<|end_message|>"
ARGS = '{"name": "weather", "args": {"city": "Rome"}}'
INKLING = [
    Case("", []),
    Case("plain", [text("plain")]),
    Case("two words", [text("two words")]),
    Case(SAID + "<|content_model_end_sampling|>", [text("I look.")]),
    Case("<|message_model|>" + SAID, [text("I look.")]),
    Case(THOUGHT + "<|message_model|>" + SAID, [reasoning("Hm."), text("I look.")]),
    Case("Hm.<|end_message|><|message_model|>" + SAID, [reasoning("Hm."), text("I look.")], True),
    Case(SAID + FORMS["channels, Inkling"].write(CALLS), [text("I look."), *TWO]),
    Case(inkling(ARGS).removeprefix("<|message_model|>"), [ROME]),
    Case(inkling('{"name":"weather","args":{"city":"Rome"}}'), [ROME]),
    Case(inkling('{"name":"now","args":{},"more":1}'), [NOW]),
    Case(inkling('{"name":"now"}'), [NOW]),
    Case(inkling(ARGS, ""), [ROME]),
    Case(THOUGHT + inkling(ARGS), [reasoning("Hm."), ROME]),
    Case("<|content_thinking|>Hm." + inkling(ARGS), [reasoning("Hm."), ROME]),
    Case(inkling(ARGS[:-4]).removesuffix("<|end_message|>"), [call("weather", '{"city": "Rom')]),
    Case(inkling("[1]"), [text("weather<|content_invoke_tool_json|>[1]")]),
    Case("a <|content_text|> b", [text("a <|content_text|> b")]),
]


def muse(to: str, content: str) -> str:
    return f"<|start|>assistant to={to}<|message|>{content}<|eom|>"


BLOCK = FORMS["channels, Muse"].write(CALLS)
CITY = '<atem:parameter name="city">Rome</atem:parameter>'
INVOKED = f'<atem:function_calls>\n<atem:invoke name="weather">\n{CITY}\n</atem:invoke>\n'
ENDED = INVOKED + "</atem:function_calls>"
MUSE = [
    Case("", []),
    Case("plain", [text("plain")]),
    Case(" to=user<|message|>Yes.<|eot|>", [text("Yes.")]),
    Case("<|message|>Yes.<|eot|>", [text("Yes.")]),
    Case(
        " to=self<|message|>Hm.<|eom|>" + muse("user", "Yes <b>"),
        [reasoning("Hm."), text("Yes <b>")],
    ),
    Case("Hm.<|eom|>" + muse("user", "Yes."), [reasoning("Hm."), text("Yes.")], True),
    Case(
        muse("self", "Hm.") + muse("user", "I look.") + BLOCK,
        [reasoning("Hm."), text("I look."), *TWO],
    ),
    Case(" to=weather<|message|>" + ENDED + "<|eot|>", [ROME]),
    Case(muse("weather", ENDED) + muse("weather", ENDED), [ROME, ROME]),
    Case(
        muse("weather", ENDED.replace("Rome", " R\n<b> ")), [call("weather", {"city": " R\n<b> "})]
    ),
    Case(muse("weather", INVOKED), [ROME]),
    Case(muse("weather", INVOKED.removesuffix("</atem:invoke>\n")), [ROME]),
    Case(muse("weather", INVOKED.partition("</atem:par")[0]), [ROME]),
    Case(
        muse("self", "Hm." + "<|start|>assistant to=now<|message|>x"), [reasoning("Hm."), text("x")]
    ),
    # Said to the user, it is no call.
    Case(muse("user", "So: " + ENDED), [text("So: " + ENDED)]),
    Case(muse("weather", "I cannot."), [text("I cannot.")]),
]
CASES = {"kimi_channels": KIMI, "inkling": INKLING, "muse": MUSE}
EVERY = [(name, case) for name, cases in CASES.items() for case in cases]


@pytest.mark.parametrize(("name", "case"), EVERY, ids=lambda one: str(one)[:60])
def test_messages_become_events_however_they_are_cut(name: str, case: Case) -> None:
    check(FAMILIES[name], case)


@pytest.mark.parametrize("name", CASES)
def test_without_tools_a_call_is_text_and_thinking_is_told_all_the_same(name: str) -> None:
    for case in CASES[name]:
        for events in every_cut(FAMILIES[name], case.output, parses_tools=False).values():
            assert {event[0] for event in events} <= {"text", "reasoning"}
