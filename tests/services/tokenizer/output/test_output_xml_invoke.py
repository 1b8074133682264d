from __future__ import annotations

import pytest
from support.tokenizer.output.replay import Case, call, check, reasoning, text

from penstock.services.tokenizer.output.families import FAMILIES

OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"


def invoke(name: str, **values: str) -> str:
    inside = "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in values.items())
    return f'<invoke name="{name}">\n{inside}</invoke>\n'


ROME = invoke("weather", city="Rome")
MINIMAX_CASES = [
    Case(f"{OPEN}\n{ROME}{CLOSE}", [call("weather", {"city": "Rome"})]),
    Case(f"{OPEN}\n{ROME}{ROME}{CLOSE}\n", [call("weather", {"city": "Rome"})] * 2),
    Case(f"{OPEN}{ROME}{CLOSE}{OPEN}{ROME}{CLOSE}", [call("weather", {"city": "Rome"})] * 2),
    Case(f"{OPEN}{ROME}Done", [call("weather", {"city": "Rome"}), text("Done")]),
    Case(f"{OPEN}<invoke name='now'></invoke>{CLOSE}", [call("now")]),
    Case(f"{OPEN}<invoke name=now></invoke>{CLOSE}", [call("now")]),
    Case(
        OPEN + invoke("weather", city="\n7\n", days="7", celsius="false") + CLOSE,
        [call("weather", {"city": "\n7\n", "days": 7, "celsius": False})],
    ),
    Case(
        OPEN + invoke("search", filters='{"x": "</para"}', tags="[]", score=".5") + CLOSE,
        [call("search", {"filters": {"x": "</para"}, "tags": [], "score": 0.5})],
    ),
    Case(
        OPEN + '<invoke name="weather"><parameter name="city">Rome</invoke>' + CLOSE,
        [call("weather", {"city": "Rome"})],
    ),
    Case(
        OPEN + '<invoke name="weather"><parameter name="city">Rome' + CLOSE + "x",
        [call("weather", {"city": "Rome"}), text("x")],
    ),
    Case(
        OPEN + '<invoke name="now"><invoke name="now"></invoke>' + CLOSE,
        [call("now"), call("now")],
    ),
    Case(OPEN + '<invoke name="now">So' + CLOSE, [call("now"), text("So" + CLOSE)]),
    Case(ROME, [text(ROME)]),
    Case(f"{OPEN}{CLOSE}", [text(f"{OPEN}{CLOSE}")]),
    Case(f"{OPEN}none{CLOSE}", [text(f"{OPEN}none{CLOSE}")]),
    Case(OPEN + '<invoke name="">', [text(OPEN + '<invoke name="">')]),
    Case(OPEN + '<invoke name="wea', [text(OPEN + '<invoke name="wea')]),
    Case(
        OPEN + '<invoke name="weather"><parameter name="city">Ro</par',
        [call("weather", '{"city": "Ro</par')],
    ),
    Case(
        f"<think>So.\n{OPEN}{ROME}{CLOSE}</think>ok",
        [reasoning("So."), call("weather", {"city": "Rome"}), text("ok")],
    ),
]

D = "｜DSML｜"


def dsml(*invokes: str, wrapper: str = "function_calls") -> str:
    return f"<{D}{wrapper}>\n" + "\n".join(invokes) + f"\n</{D}{wrapper}>"


def dsml_invoke(name: str, **values: tuple[str, str]) -> str:
    inside = "".join(
        f'<{D}parameter name="{k}" string="{kind}">{v}</{D}parameter>\n'
        for k, (kind, v) in values.items()
    )
    return f'<{D}invoke name="{name}">\n{inside}</{D}invoke>'


DSML_CASES = [
    Case(dsml(dsml_invoke("weather", city=("true", "Rome"))), [call("weather", {"city": "Rome"})]),
    Case(
        dsml(dsml_invoke("weather", city=("true", "7"), days=("false", "7"))),
        [call("weather", {"city": "7", "days": 7})],
    ),
    Case(
        dsml(dsml_invoke("f", a=("true", "[1]"), b=("false", "[1]"), c=("false", "null"))),
        [call("f", {"a": "[1]", "b": [1], "c": None})],
    ),
    Case(
        dsml(dsml_invoke("weather", city=("true", "</parameter> </invoke>"))),
        [call("weather", {"city": "</parameter> </invoke>"})],
    ),
    Case(
        dsml(dsml_invoke("now"), dsml_invoke("weather", city=("true", "Rome"))),
        [call("now"), call("weather", {"city": "Rome"})],
    ),
    Case(
        f'<{D}function_calls><{D}invoke name="weather"><{D}parameter name="days">3</{D}parameter>'
        f"</{D}invoke></{D}function_calls>",
        [call("weather", {"days": 3})],
    ),
    Case(f"<{D}function_calls>", [text(f"<{D}function_calls>")]),
    Case(f"a <{D}x", [text(f"a <{D}x")]),
]
STEP3_CASES = [
    Case(
        "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="weather"><steptml:parameter name="city">Rome</steptml:parameter>'
        "</steptml:invoke><｜tool_call_end｜><｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="now"></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>ok',
        [call("weather", {"city": "Rome"}), call("now"), text("ok")],
    ),
]
MINICPM_CASES = [
    Case(
        '<function name="weather"><param name="city"><![CDATA[a</param>]]b]]></param>'
        '<param name="days">2</param></function>',
        [call("weather", {"city": "a</param>]]b", "days": 2})],
    ),
    Case('<function name="now"></function>So', [call("now"), text("So")]),
]


@pytest.mark.parametrize("case", MINIMAX_CASES, ids=lambda case: case.output[:40])
def test_an_output_gives_its_events_however_it_is_cut(case: Case) -> None:
    check(FAMILIES["xml_invoke_minimax"], case)


@pytest.mark.parametrize("case", DSML_CASES, ids=lambda case: case.output[:40])
def test_parameters_that_say_whether_they_are_strings_are_read_so(case: Case) -> None:
    check(FAMILIES["xml_invoke_dsml"], case)


@pytest.mark.parametrize("case", STEP3_CASES, ids=lambda case: case.output[:40])
def test_calls_between_tokens_of_their_own_are_read(case: Case) -> None:
    check(FAMILIES["xml_invoke_step3"], case)


@pytest.mark.parametrize("case", MINICPM_CASES, ids=lambda case: case.output[:40])
def test_values_in_cdata_are_read_as_they_stand(case: Case) -> None:
    check(FAMILIES["xml_invoke_minicpm"], case)
