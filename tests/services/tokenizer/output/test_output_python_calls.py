from __future__ import annotations

import pytest
from support.tokenizer.output.replay import Case, call, check, reasoning, text

from penstock.services.tokenizer.output.families import FAMILIES

ROME, NOW = call("weather", {"city": "Rome"}), call("now")


def inside(arguments: str) -> str:
    return f"[search({arguments})]"


def searched(**arguments: object) -> list[object]:
    return [call("search", arguments)]


CASES = [
    Case("", []),
    Case("Hello [now()]", [text("Hello [now()]")]),
    Case("[now()]", [NOW]),
    Case(" \n[ now ( ) ]", [NOW]),
    Case("[weather(city='Rome')]", [ROME]),
    Case('[weather(city="Rome"), now()]\n', [ROME, NOW]),
    Case("[now(), now()] Done", [NOW, NOW, text("Done")]),
    Case("<think>Why</think>[now()]", [reasoning("Why"), NOW]),
    Case("<|python_start|>[now()]<|python_end|>So", [NOW, text("So")]),
    Case("So: <|python_start|>[weather(city='Rome')]<|python_end|>", [text("So:"), ROME]),
    Case("[other(x=1)]", [text("[other(x=1)]")]),
    Case("[1, 2]", [text("[1, 2]")]),
    Case("[now](link)", [text("[now](link)")]),
    Case("[weather", [text("[weather")]),
    Case(inside("a=1, b=-2.5, c=1e3, d=+7, e=0x1F, f=1_000, g=.5, h=2.").replace("g=", " g ="),
         searched(a=1, b=-2.5, c=1000.0, d=7, e=31, f=1000, g=0.5, h=2.0)),
    Case(inside("a=True, b=False, c=None, d=true, e=null"),
         searched(a=True, b=False, c=None, d=True, e=None)),
    Case(inside("a=[1, 'x', [], {}], b=(1, 2), c={'k': [True]}, d={}"),
         searched(a=[1, "x", [], {}], b=[1, 2], c={"k": [True]}, d={})),
    Case(inside("a=[1, 2,], b={'k': 1,},"), searched(a=[1, 2], b={"k": 1})),
    Case(inside("a={k: 1, 2: 'x'}"), searched(a={"k": 1, "2": "x"})),
    Case(inside(r"query='a\'b\"c\\d\n\t\x41\u00e9\U0001F600\ud83d\ude00\q'"),
         searched(query="a'b\"c\\d\n\tAé😀😀\\q")),
    Case(inside(r"query='\u005cn \ud800 \u12'"), searched(query="\\n \ufffd \\u12")),
    Case(inside("query='it's raw'"), searched(query="it's raw")),
    Case(inside('query="a \'b\' c"'), searched(query="a 'b' c")),
    Case(inside("query='a\nb'"), searched(query="a\nb")),
    Case(inside("query=''"), searched(query="")),
    Case(inside("query='a' , tags=['b' ]"), searched(query="a", tags=["b"])),
    Case(inside("query=f'x', tags=[r'y']"), searched(query="x", tags=["y"])),
    Case(inside("query=Rome, limit=ten"), searched(query="Rome", limit="ten")),
    Case(inside("query=')]', tags=['[now()]']"), searched(query=")]", tags=["[now()]"])),
    Case(inside("limit=5, score=1"), searched(limit=5, score=1)),
    Case("[weather(city='Ro", [call("weather", '{"city": "Ro')]),
    Case("[weather(city='Rome', days=3", [call("weather", '{"city": "Rome"')]),
    Case("[weather(city='Rome')", [ROME]),
    Case("[weather(city='Rome'), ", [ROME, text(", ")]),
    Case("[weather(city='Rome')] and", [ROME, text("and")]),
    Case("[weather(1)]", [call("weather", "1")]),
    Case("[weather(1), now()]. So", [call("weather", "1), now("), text(". So")]),
    Case("[weather(*x)]", [call("weather", "*x")]),
]  # fmt: skip
LINES = [
    Case("<function_calls>\nweather(city='Rome')\nnow()\n</function_calls>", [ROME, NOW]),
    Case("I do.\n<function_calls>now()</function_calls>\nDone", [text("I do."), NOW, text("Done")]),
    Case("<function_calls>\nnow()", [NOW]),
    Case("<function_calls>\nnow()\nOops", [NOW, text("Oops")]),
    Case("<function_calls>\nno calls</function_calls>",
         [text("<function_calls>\nno calls</function_calls>")]),
    Case("<function_calls>weather(1)</function_calls>x", [call("weather", "1"), text("x")]),
]  # fmt: skip
LFM2 = [
    Case("<|tool_call_start|>[weather(city='Rome'), now()]<|tool_call_end|>Ok.",
         [ROME, NOW, text("Ok.")]),
    Case("<|tool_call_start|>[now()]<|tool_call_end|>", [NOW]),
    Case("<think>Why</think><|tool_call_start|>[now()]<|tool_call_end|>", [reasoning("Why"), NOW]),
    Case("<|tool_call_start|>[now(<|tool_call_end|>x", [NOW, text("x")]),
    Case("<|tool_call_start|>now<|tool_call_end|>",
         [text("<|tool_call_start|>now<|tool_call_end|>")]),
    Case("[now()]", [text("[now()]")]),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.output[:60])
def test_calls_in_a_list_are_read_however_they_are_cut(case: Case) -> None:
    check(FAMILIES["python_calls"], case)


@pytest.mark.parametrize("case", LINES, ids=lambda case: case.output[:60])
def test_a_call_in_each_line_is_read_however_it_is_cut(case: Case) -> None:
    if '</function_calls>")' not in case.output:
        check(FAMILIES["python_calls_lines"], case)


@pytest.mark.parametrize("case", LFM2, ids=lambda case: case.output[:60])
def test_calls_between_marks_are_read_however_they_are_cut(case: Case) -> None:
    check(FAMILIES["python_calls_lfm2"], case)
