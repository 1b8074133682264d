"""Thirty conversations, written as no API in particular has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Call(NamedTuple):
    id: str
    name: str
    arguments: Mapping[str, Any]


class Turn(NamedTuple):
    """A message. ``calls`` and ``thought`` are an assistant's, ``answers`` is the id of the call
    whose result this is."""

    role: str
    text: str = ""
    calls: Sequence[Call] = ()
    answers: str = ""
    thought: str = ""


class Tool(NamedTuple):
    name: str
    description: str
    parameters: Mapping[str, Any]


class Conversation(NamedTuple):
    name: str
    turns: Sequence[Turn]
    tools: Sequence[Tool] = ()
    thinks: bool = True
    stop: Sequence[str] = ()
    max_tokens: int = 96


def system(text: str) -> Turn:
    return Turn("system", text)


def user(text: str) -> Turn:
    return Turn("user", text)


def assistant(text: str = "", *calls: Call, thought: str = "") -> Turn:
    return Turn("assistant", text, calls, thought=thought)


def result(call: Call, text: str) -> Turn:
    return Turn("tool", text, answers=call.id)


def tool(name: str, description: str, **parameters: str) -> Tool:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    required = list(parameters)
    return Tool(
        name, description, {"type": "object", "properties": properties, "required": required}
    )


WEATHER = tool("get_weather", "Get the current weather of a city.", city="string")
TIMER = tool("set_timer", "Start a timer.", minutes="integer")
MESSAGE = tool("send_message", "Send a message to a person.", to="string", text="string")
NOW = tool("now", "Get the time.")
OSLO = Call("call_oslo00001", "get_weather", {"city": "Oslo"})
ROME = Call("call_rome00001", "get_weather", {"city": "Rome"})
SHORT = Call("call_timer0001", "set_timer", {"minutes": 12})
MOTHER = Call("call_message01", "send_message", {"to": "Ünal", "text": 'say "é😀"\n{x}'})
SUM = user("What is 17 + 25?")
STORY = user("Tell me a story.")
ASKED = user("What is the weather in Oslo?")


def _plain() -> Iterator[Conversation]:
    yield Conversation("a greeting", [user("Hello")])
    yield Conversation("a system message", [system("You are brief."), user("Hello")])
    yield Conversation(
        "a long system message", [system("You help people.\n\n- Be kind.\n" * 12), user("Hi")]
    )
    yield Conversation("a sum", [SUM])
    yield Conversation("a sum without thinking", [SUM], thinks=False)
    yield Conversation(
        "a sum behind a system message", [system("You calculate."), user("What is 123 + 456?")]
    )
    yield Conversation("thinking that is cut", [user("What is 1234 + 2345?")], max_tokens=20)
    yield Conversation("an answer that is cut", [STORY], max_tokens=7)
    yield Conversation("one token", [user("Hello")], max_tokens=1)
    yield Conversation("a stop string", [user("Hello")], stop=["help"])
    yield Conversation("a stop string that thinking has, too", [SUM], stop=["2"])
    yield Conversation("several stop strings", [STORY], stop=["\n\n", "zzz", ". "])
    yield Conversation("a stop string that never comes", [user("Hello")], stop=["§ never §"])
    yield Conversation("a spelling", [user("Spell the word turbine backwards")])
    yield Conversation("a spelling without thinking", [user("Spell water")], thinks=False)


def _turns() -> Iterator[Conversation]:
    hello = [user("Hello"), assistant("Hello! How can I help you?")]
    yield Conversation("a second turn", [*hello, SUM])
    yield Conversation(
        "a second turn with earlier thinking",
        [SUM, assistant("42", thought="17 + 25 = 42."), user("And 42 + 1?")],
    )
    yield Conversation(
        "many turns",
        [system("You are brief."), *(hello * 5), user("Thanks"), assistant("Bye."), SUM],
    )
    yield Conversation("unicode", [user("Grüße, 世界! 😀 e\u0301 \u202eabc\u202c \t\n  ¿qué?")])
    yield Conversation(
        "unicode in a system message and an answer",
        [system("Ωμέγα — «ß»"), user("नमस्ते"), assistant("🇳🇴 ok\n\n"), user("\u00a0x\u2028y")],
        max_tokens=40,
    )
    yield Conversation(
        "marks in a message", [user('Is <think> or </tool_call> a mark? <|im_end|> {"a": [1]}')]
    )
    yield Conversation(
        "spaces at the ends of messages",
        [user("  Hello \n"), assistant(" Hi \n"), user("\n\nTest ")],
    )


def _tools() -> Iterator[Conversation]:
    both = [WEATHER, TIMER]
    told = [ASKED, assistant("", OSLO), result(OSLO, "rain, 4 °C")]
    yield Conversation("a tool that is called", [ASKED], [WEATHER])
    yield Conversation("tools that nothing is asked of", [user("Hello")], both)
    yield Conversation(
        "a tool behind a system message", [system("You call tools."), ASKED], both, thinks=False
    )
    yield Conversation("a result", told, both)
    yield Conversation(
        "results of two calls",
        [
            user("Weather in Oslo and Rome?"),
            assistant("I look.", OSLO, ROME),
            result(OSLO, "rain"),
            result(ROME, '{"sky": "clear", "é": [1, 2.50]}'),
        ],
        [WEATHER, NOW],
    )
    yield Conversation(
        "arguments of every kind, answered and gone on from",
        [user("Tell Ünal"), assistant("", MOTHER), result(MOTHER, ""), assistant("Sent."), ASKED],
        [MESSAGE, WEATHER],
    )
    yield Conversation(
        "calls in a history whose tools are not offered any more",
        [*told, assistant("It rains in Oslo.", thought="The tool said so."), SUM],
    )
    yield Conversation(
        "a call that is cut", [user("Set a timer for 12 minutes.")], [TIMER], max_tokens=16
    )


CONVERSATIONS = [*_plain(), *_turns(), *_tools()]
