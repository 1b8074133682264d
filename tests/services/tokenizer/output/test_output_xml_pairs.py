from __future__ import annotations

import pytest
from support.tokenizer.output.replay import Case, call, check, text

from penstock.services.tokenizer.output.families import FAMILIES


def pairs(name: str, **values: str) -> str:
    inside = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items()
    )
    return f"<tool_call>{name}\n{inside}</tool_call>"


ROME = pairs("weather", city="Rome")
CASES = [
    Case(ROME, [call("weather", {"city": "Rome"})]),
    Case(ROME.replace("\n", ""), [call("weather", {"city": "Rome"})]),
    Case(f"{ROME}\n{ROME}", [call("weather", {"city": "Rome"})] * 2),
    Case("<tool_call>now</tool_call>", [call("now")]),
    Case("<tool_call>\nnow\n</tool_call>", [call("now")]),
    Case(
        pairs("weather", city=" 7\n", days=" 7\n"), [call("weather", {"city": " 7\n", "days": 7})]
    ),
    Case(
        pairs("search", filters='{"a": "</arg_"}', limit="none"),
        [call("search", {"filters": {"a": "</arg_"}, "limit": None})],
    ),
    Case(pairs("search", query='"q" <b>\n'), [call("search", {"query": '"q" <b>\n'})]),
    Case(pairs("f", a="1", b="x", c="true"), [call("f", {"a": 1, "b": "x", "c": True})]),
    Case(
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome<arg_key>days</arg_key>"
        "<arg_value>1</tool_call>",
        [call("weather", {"city": "Rome", "days": 1})],
    ),
    Case(
        f"<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value>{ROME}",
        [call("weather", {"city": "Rome"})] * 2,
    ),
    Case(
        "<tool_call>weather<arg_key>city</arg_value>x", [call("weather"), text("city</arg_value>x")]
    ),
    Case(
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value>So.",
        [call("weather", {"city": "Rome"}), text("So.")],
    ),
    Case("<tool_call>two words</tool_call>", [text("<tool_call>two words</tool_call>")]),
    Case(
        '<tool_call>{"name": "now"}</tool_call>', [text('<tool_call>{"name": "now"}</tool_call>')]
    ),
    Case("<tool_call></tool_call>", [text("<tool_call></tool_call>")]),
    Case("<arg_key>a</arg_key>", [text("<arg_key>a</arg_key>")]),
    Case("<tool_call>wea", [text("<tool_call>wea")]),
    Case("<tool_call>weather<arg_key>ci", [call("weather"), text("ci")]),
    Case(
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Ro",
        [call("weather", '{"city": "Ro')],
    ),
]
HUNYUAN = (
    "<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n"
    "<arg_value>Rome</arg_value>\n</tool_call>\n"
)
HUNYUAN_CASES = [
    Case(HUNYUAN + "</tool_calls>Done", [call("weather", {"city": "Rome"}), text("Done")]),
    Case(
        HUNYUAN + "<tool_call>now<tool_sep>\n</tool_call>\n</tool_calls>",
        [call("weather", {"city": "Rome"}), call("now")],
    ),
    Case("<tool_call>now<tool_sep></tool_call>", [call("now")]),
    Case(HUNYUAN + "Done", [call("weather", {"city": "Rome"}), text("Done")]),
    Case(
        "<tool_calls>\n<tool_call>now</tool_call>",
        [text("<tool_calls>\n<tool_call>now</tool_call>")],
    ),
    Case("<tool_calls>\n</tool_calls>", [text("<tool_calls>\n</tool_calls>")]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.output[:40])
def test_an_output_gives_its_events_however_it_is_cut(case: Case) -> None:
    check(FAMILIES["xml_pairs"], case)


@pytest.mark.parametrize("case", HUNYUAN_CASES, ids=lambda case: case.output[:40])
def test_calls_in_a_wrapper_with_a_mark_behind_the_name_are_read(case: Case) -> None:
    check(FAMILIES["xml_pairs_hunyuan"], case)
