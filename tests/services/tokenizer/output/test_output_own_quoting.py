from __future__ import annotations

import pytest
from support.tokenizer.output.replay import Case, call, check, reasoning, text

from penstock.services.tokenizer.output.families import FAMILIES

OPEN, CLOSE, QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"
NOW, ROME = call("now"), call("weather", {"city": "Rome"})


def one(arguments: str, name: str = "search") -> str:
    return f"{OPEN}call:{name}{{{arguments}}}{CLOSE}"


def searched(**arguments: object) -> list[object]:
    return [call("search", arguments)]


RAIN = one("city:<escape>Rome<escape>", "weather")
CASES = [
    Case("", []),
    Case("Hello {k:<escape>v<escape>}", [text("Hello {k:<escape>v<escape>}")]),
    Case(one("", "now"), [NOW]),
    Case(RAIN, [ROME]),
    Case("I look. " + RAIN + "\n" + one("", "now") + "Done", [text("I look."), ROME, NOW,
                                                               text("Done")]),
    Case("<think>Why</think>" + RAIN, [reasoning("Why"), ROME]),
    Case("Why" + RAIN, [reasoning("Why"), ROME], in_reasoning=True),
    Case(one("limit:5,score:-1.5e3,x:true,y:false,z:null"),
         searched(limit=5, score=-1500.0, x=True, y=False, z=None)),
    Case(one("tags:[<escape>a<escape>,<escape>b, c<escape>],filters:{k:<escape>v<escape>,n:1}"),
         searched(tags=["a", "b, c"], filters={"k": "v", "n": 1})),
    Case(one("filters:{<escape>a b<escape>:[],<escape>c<escape>:{}}"),
         searched(filters={"a b": [], "c": {}})),
    Case(one("query:<escape>{[(\"'\\n<<esc}<escape>"), searched(query="{[(\"'\\n<<esc}")),
    Case(one("query:<escape><escape>"), searched(query="")),
    Case(one("query:<escape>two\nlines<escape> , limit : 3"),
         searched(query="two\nlines", limit=3)),
    Case(one('query:"quoted \\"x\\""'), searched(query='quoted "x"')),
    Case(one("query:New York,limit:ten"), searched(query="New York", limit="ten")),
    Case(one("query:a <b> c"), searched(query="a <b> c")),
    Case(one("query:02139"), searched(query="02139")),
    Case(one("limit:5,"), searched(limit=5)),
    Case(OPEN + "call:weather{city:<escape>Ro", [call("weather", '{"city": "Ro')]),
    Case(OPEN + "call:weather{city:<escape>Rome<escape>", [call("weather", '{"city": "Rome"')]),
    Case(OPEN + "call:weather{city:<escape>Rome<escape>}", [ROME]),
    Case(OPEN + "call:weather{city:<escape>Rome<escape>" + CLOSE + "So", [ROME, text("So")]),
    Case(OPEN + "call:now{}" + OPEN + "call:now{}", [NOW, NOW]),
    Case(OPEN + "call:now{}call:now{}" + CLOSE, [NOW, NOW]),
    Case(OPEN + "now{}" + CLOSE, [text(OPEN + "now{}" + CLOSE)]),
    Case(OPEN, [text(OPEN)]),
    Case(one("1"), [call("search", "1}")]),
]  # fmt: skip


def in_gemma_4(output: str) -> str:
    for old, new in ((OPEN, "<|tool_call>"), (CLOSE, "<tool_call|>"), (QUOTE, '<|"|>'),
                     ("<think>", "<|channel>thought\n"), ("</think>", "<channel|>")):  # fmt: skip
        output = output.replace(old, new)
    return output


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.output[:60])
def test_an_output_gives_its_events_however_it_is_cut(case: Case) -> None:
    check(FAMILIES["own_quoting_functiongemma"], case)
    expected = [
        item._replace(text=in_gemma_4(item.text)) if hasattr(item, "text") else item
        for item in case.expected
    ]
    moved = case._replace(output=in_gemma_4(case.output), expected=expected)
    check(FAMILIES["own_quoting_gemma4"], moved)


def test_thinking_needs_its_label() -> None:
    cases = [
        Case("<|channel>thought\n<channel|>Hi", [text("Hi")]),
        Case("<|channel>thought\nHm.\n<channel|>\nHi", [reasoning("Hm."), text("Hi")]),
        Case("<|channel>other<channel|>Hi", [text("<|channel>other<channel|>Hi")]),
    ]
    for case in cases:
        check(FAMILIES["own_quoting_gemma4"], case)
