from __future__ import annotations

import pytest
from support.tokenizer.output.replay import Case, call, check, reasoning, text

from penstock.services.tokenizer.output.families import FAMILIES


def function(name: str, **parameters: str) -> str:
    inside = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in parameters.items())
    return f"<function={name}>\n{inside}</function>"


ROME = function("weather", city="Rome")
CASES = [
    Case(f"<tool_call>\n{ROME}\n</tool_call>", [call("weather", {"city": "Rome"})]),
    Case(ROME, [call("weather", {"city": "Rome"})]),
    Case(f"{ROME}\n</tool_call>", [call("weather", {"city": "Rome"})]),
    Case(f"{ROME}{ROME}", [call("weather", {"city": "Rome"})] * 2),
    Case(
        f"<tool_call>{ROME}<tool_call>{ROME}</tool_call>",
        [call("weather", {"city": "Rome"})] * 2,
    ),
    Case(
        "<tool_call><function=weather><parameter=city>Rome</parameter></function></tool_call>",
        [call("weather", {"city": "Rome"})],
    ),
    Case(
        "<function=weather><parameter=city>\n\n a \n\n</parameter></function>",
        [call("weather", {"city": "\n a \n"})],
    ),
    Case(
        "<function=weather><parameter=city>\n</parameter></function>",
        [call("weather", {"city": ""})],
    ),
    Case(
        "<function=weather><parameter=city></parameter></function>", [call("weather", {"city": ""})]
    ),
    Case(
        '<function=weather><parameter=city>"a" \\n </b> <parame &amp; é</parameter></function>',
        [call("weather", {"city": '"a" \\n </b> <parame &amp; é'})],
    ),
    Case(function("weather", city="7", days="7"), [call("weather", {"city": "7", "days": 7})]),
    Case(
        function("weather", days="seven", celsius="True"),
        [call("weather", {"days": "seven", "celsius": True})],
    ),
    Case(
        function("search", limit="null", score="1e3", tags='["a", "b"]'),
        [call("search", {"limit": None, "score": 1000.0, "tags": ["a", "b"]})],
    ),
    Case(
        function("search", filters="{'a': True, 'b': None}", tags="('x', 'y')"),
        [call("search", {"filters": {"a": True, "b": None}, "tags": ["x", "y"]})],
    ),
    Case(
        function("search", query="null", other="[1]", more="text"),
        [call("search", {"query": "null", "other": [1], "more": "text"})],
    ),
    Case(
        "<function=weather>\n<parameter=city>\nRome\n<parameter=days>\n3\n</function>",
        [call("weather", {"city": "Rome", "days": 3})],
    ),
    Case(
        "<function=weather><parameter=city>Rome</tool_call>So",
        [call("weather", {"city": "Rome"}), text("So")],
    ),
    Case(
        "<function=now>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [call("now"), call("now")],
    ),
    Case("<function=now></tool_call>", [call("now")]),
    Case("<function=now>Hm <b>", [call("now"), text("Hm <b>")]),
    Case(
        "<function=weather><parameter=city>Rome</parameter> no </function>",
        [call("weather", {"city": "Rome"}), text("no </function>")],
    ),
    Case("<function=a</tool_call>", [text("<function=a</tool_call>")]),
    Case("<tool_call>\n<function=a b>", [text("<tool_call>\n<function=a b>")]),
    Case("<function=>", [text("<function=>")]),
    Case("<function=" + "n" * 129 + ">", [text("<function=" + "n" * 129 + ">")]),
    Case("<function=weather><parameter=city>Ro", [call("weather", '{"city": "Ro')]),
    Case("<function=weather><parameter=city>Ro\n", [call("weather", '{"city": "Ro\\n')]),
    Case("<function=weather><parameter=days>1", [call("weather", '{"days": 1')]),
    Case("<function=weather><parameter=da", [call("weather"), text("<parameter=da")]),
    Case(
        f"Let me see.\n{ROME}\n</think>Done.",
        [reasoning("Let me see."), call("weather", {"city": "Rome"}), text("Done.")],
        in_reasoning=True,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.output[:40])
def test_an_output_gives_its_events_however_it_is_cut(case: Case) -> None:
    check(FAMILIES["xml_parameters"], case)
