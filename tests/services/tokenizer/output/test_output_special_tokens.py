from __future__ import annotations

import pytest
from support.tokenizer.output.replay import (
    Case,
    call,
    check,
    every_cut,
    reasoning,
    run,
    text,
    vocabularies,
)

from penstock.services.tokenizer.output.call_ids import CallIds
from penstock.services.tokenizer.output.families import FAMILIES
from penstock.services.tokenizer.output.family import IdStyle

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE, ONE_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
ROME = f'{ONE}weather{SEP}{{"city": "Rome"}}{ONE_END}'
V31_CASES = [
    Case(f"{BEGIN}{ROME}{END}", [call("weather", {"city": "Rome"})]),
    Case(
        f"Well.\n\n{BEGIN}{ROME}{ROME}{END}",
        [text("Well."), *[call("weather", {"city": "Rome"})] * 2],
    ),
    Case(ROME, [call("weather", {"city": "Rome"})]),
    Case(f"{ROME}{END}x", [call("weather", {"city": "Rome"}), text("x")]),
    Case(f"{BEGIN}{ONE}now{SEP}{{}}{ONE_END}{END}", [call("now")]),
    Case(f"{BEGIN}{ONE}now{SEP}{ONE_END}{END}", [call("now")]),
    Case(f"{BEGIN}{ONE}now{SEP}{{}}{ROME}", [call("now"), call("weather", {"city": "Rome"})]),
    Case(f"{BEGIN}{ONE}now{SEP}{{}} and", [call("now"), text("and")]),
    Case(f"{BEGIN}{END}", [text(f"{BEGIN}{END}")]),
    Case(f"{BEGIN}{ONE}two words{SEP}", [text(f"{BEGIN}{ONE}two words{SEP}")]),
    Case(f"{BEGIN}{ONE}now", [text(f"{BEGIN}{ONE}now")]),
    Case(f"a {SEP} b", [text(f"a {SEP} b")]),
    Case(
        f"So.{BEGIN}{ROME}{END}",
        [reasoning("So."), call("weather", {"city": "Rome"})],
        in_reasoning=True,
    ),
]


def fenced(name: str, arguments: str) -> str:
    return f"{ONE}function{SEP}{name}\n```json\n{arguments}\n```{ONE_END}"


V3_CASES = [
    Case(BEGIN + fenced("weather", '{"city": "```"}') + END, [call("weather", {"city": "```"})]),
    Case(
        BEGIN + fenced("now", "{}") + "\n" + fenced("now", '{\n  "a": 1\n}') + END,
        [call("now"), call("now", {"a": 1})],
    ),
    Case(BEGIN + fenced("now", "{}").replace("\n```<", "<") + END, [call("now")]),
    Case(fenced("now", "{}")[:-20], [call("now")]),
]

K_BEGIN, K_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
K_ONE, K_ARGUMENTS, K_ONE_END = (
    "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
)  # fmt: skip


def kimi(call_id: str, arguments: str) -> str:
    return f"{K_ONE}{call_id}{K_ARGUMENTS}{arguments}{K_ONE_END}"


KIMI_CASES = [
    Case(
        K_BEGIN + kimi("functions.weather:0", '{"city": "Rome"}') + K_END,
        [call("weather", {"city": "Rome"}, id="functions.weather:0")],
    ),
    Case(
        K_BEGIN + kimi(" functions.now:3 ", "{}") + kimi("functions.now:4", "{}") + K_END,
        [call("now", id="functions.now:3"), call("now", id="functions.now:4")],
    ),
    Case(kimi("now:12", "{}"), [call("now", id="now:12")]),
    Case(kimi("functions.a.b-c:0", "{}"), [call("a.b-c", id="functions.a.b-c:0")]),
    Case(kimi("functions.now", "{}"), [call("now")]),
    Case(kimi("now", "") + "ok", [call("now"), text("ok")]),
    Case(kimi("functions.now:x", "{}"), [text(kimi("functions.now:x", "{}"))]),
    Case(kimi("", "{}"), [text(kimi("", "{}"))]),
    Case(K_BEGIN + K_ONE + "functions.now:0", [text(K_BEGIN + K_ONE + "functions.now:0")]),
    Case(
        K_BEGIN + K_ONE + "functions.weather:0" + K_ARGUMENTS + '{"city": "R',
        [call("weather", '{"city": "R', id="functions.weather:0")],
    ),
]


@pytest.mark.parametrize("case", V31_CASES, ids=lambda case: case.output[:40])
def test_an_output_gives_its_events_however_it_is_cut(case: Case) -> None:
    check(FAMILIES["special_tokens_deepseek_v31"], case)


@pytest.mark.parametrize("case", V3_CASES, ids=lambda case: case.output[:40])
def test_arguments_in_a_fence_are_read(case: Case) -> None:
    check(FAMILIES["special_tokens_deepseek_v3"], case)


@pytest.mark.parametrize("case", KIMI_CASES, ids=lambda case: case.output[:60])
def test_a_call_has_the_id_that_the_model_writes(case: Case) -> None:
    check(FAMILIES["special_tokens_kimi"], case)


def test_a_mark_that_is_a_token_ends_arguments_even_within_a_string() -> None:
    family = FAMILIES["special_tokens_deepseek_v31"]
    vocabulary = vocabularies(family)["tokens"]
    texts = [BEGIN, ONE, "now", SEP, '{"a": "', ONE_END, END, "ok"]
    events = run(family, vocabulary, [(vocabulary.added.get(one, 1), one) for one in texts])
    assert events == [
        ("call", 0, "call-0-now", "now", ""),
        ("arguments", 0, '{"a": ""}'),
        ("text", "ok"),
    ]


REPEATED = {
    "special_tokens_kimi": (
        K_BEGIN + "".join(
            f"{K_ONE}functions.now:{number}{K_ARGUMENTS}{{}}{K_ONE_END}" for number in (0, 0, 2, 0)
        ),
        ["functions.now:0", "functions.now:1", "functions.now:2", "functions.now:3"],
    ),
    "json_array_mistral": (
        "".join(f"[TOOL_CALLS]now[CALL_ID]{one}[ARGS]{{}}" for one in ("a", "b", "a")),
        ["a", "b", "number 2"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REPEATED)
def test_an_id_that_a_model_writes_twice_is_that_of_one_call_alone(name: str) -> None:
    output, ids = REPEATED[name]
    make_id = CallIds(IdStyle.KIMI, "", 0) if "kimi" in name else lambda index, _: f"number {index}"
    for events in every_cut(FAMILIES[name], output, make_id=make_id).values():
        assert [event[2] for event in events if event[0] == "call"] == ids


def test_ids_differ_even_where_a_model_has_written_those_that_replace_them() -> None:
    taken = ["now:1024", "functions.now:1024", "functions.now:1", "functions.now:1"]
    calls = [f"{K_ONE}{one}{K_ARGUMENTS}{{}}{K_ONE_END}" for one in (*taken, *["x:9"] * 9)]
    family, make_id = FAMILIES["special_tokens_kimi"], CallIds(IdStyle.KIMI, "", 0)
    for events in every_cut(family, "".join(calls), make_id=make_id, thorough=()).values():
        ids = [event[2] for event in events if event[0] == "call"]
        assert len(set(ids)) == len(ids) == len(calls)
