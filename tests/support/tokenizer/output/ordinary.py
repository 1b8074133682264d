"""Outputs that every family writes, made from its envelope."""

from __future__ import annotations

from itertools import pairwise

from support.tokenizer.output.replay import Call, Case, call, reasoning, text
from support.tokenizer.output.written import written

from penstock.services.tokenizer.output.family import Action, Family, IdStyle

TEXTS = [
    "",
    "Hello, world.",
    " two\n\nlines \n",
    "\n\n indented",
    "a < b, a <t, {x}, [y], </",
    "a" + "\n" * 100 + "b",
    " " * 70 + "c ",
]


def ordinary_cases(family: Family) -> list[Case]:
    """Content alone, calls alone and both together, with and without reasoning."""
    rome, now = ("weather", {"city": "Rome"}), ("now", {})
    one, two = written(family, [rome]), written(family, [rome, now, rome])
    long = {"query": 'a "b" \\n é😀\n{"x": [1]}\n </a> <b', "limit": 3, "score": 2.5}
    nested = {"filters": {"a": [1, {"b": "]}"}, [], {}], "c": None}, "tags": ["x", "y"]}
    typed = {"city": "7", "days": 7, "celsius": True}
    cases = [Case(content, [text(content)] if content else []) for content in TEXTS]
    cases += [
        Case(one, [call(*rome)]),
        Case("I look.\n" + one, [text("I look."), call(*rome)]),
        Case("\n" + one + "\n", [call(*rome)]),
        Case(two, [call(*rome), call(*now), call(*rome)]),
        Case(one + "\nDone.\n", [call(*rome), text("Done.\n")]),
        Case(one + "\n\n" + one, [call(*rome), call(*rome)]),
        Case(written(family, [now]), [call(*now)]),
        Case(written(family, [("search", long)]), [call("search", long)]),
        Case(written(family, [("search", nested)]), [call("search", nested)]),
        Case(written(family, [("weather", typed)]), [call("weather", typed)]),
        Case(written(family, [("unheard-of", {"x": 1})]), [call("unheard-of", {"x": 1})]),
        Case("one<|im_end|> two", [text("one two")]),
        Case(" " * 100 + one, [text(" " * 36), call(*rome)]),
    ]
    if family.ids is IdStyle.KIMI:
        cases = [_with_ids(case) for case in cases]
    cases += _reasoned(family, one)
    is_bare = family.declared_only or any(Action.DECLARED in one.actions for one in family.begin)
    # What ``written`` gives begins within a message's header, which the prompt has begun.
    is_bare |= family.channel_thinking is not None and bool(family.channel_thinking.following)
    return [case for case in cases if not is_bare or _is_told(case)]


def _is_told(case: Case) -> bool:
    """Without a mark a call is one only from the first character on, and of a declared tool."""
    calls = [place for place, item in enumerate(case.expected) if isinstance(item, Call)]
    texts = [place for place, item in enumerate(case.expected) if not isinstance(item, Call)]
    declared = all(case.expected[place].name in case.tools for place in calls)  # type: ignore[union-attr]
    one_run = all(after - before == 1 for before, after in pairwise(calls))
    return declared and (not calls or (one_run and all(calls[0] < place for place in texts)))


def _reasoned(family: Family, one: str) -> list[Case]:
    if family.reasoning is None:
        return []
    opened, closed = family.reasoning.open + family.reasoning.label, family.reasoning.close
    thought, rome = reasoning("Why\nnot"), call("weather", {"city": "Rome"})
    if family.ids is IdStyle.KIMI:
        rome = rome._replace(id="functions.weather:0")
    mention = one[: len(one) // 4]
    return [
        Case(f"{opened}\nWhy\nnot\n{closed}\n\nSo.", [thought, text("So.")]),
        Case(f"Why\nnot{closed}{one}", [thought, rome], in_reasoning=True),
        Case(f"{opened}Why\nnot\n{one}{closed}\nSo.", [thought, rome, text("So.")]),
        Case(f"Why\nnot\n{mention}", [reasoning(f"Why\nnot\n{mention}")], in_reasoning=True),
        Case(f"{opened}{closed}{one}", [rome]),
        Case(f"{opened}\n\n{closed}\n\nSo", [text("So")]),
        Case("Why\nnot \n", [reasoning("Why\nnot \n")], in_reasoning=True),
        Case(f"So.{closed} ", [text(f"So.{closed} ")]),
    ]


def _with_ids(case: Case) -> Case:
    """Calls have the ids that the model writes, which count from 0 in each section; one that was
    written before is replaced."""
    expected, index, ids = [], 0, set[str]()
    sections = case.output.count("section_begin") > 1
    for item in case.expected:
        if not isinstance(item, tuple) or not hasattr(item, "arguments"):
            expected.append(item)
            continue
        written_id = f"functions.{item.name}:{0 if sections else index}"
        expected.append(item._replace(id=None if written_id in ids else written_id))
        ids.add(written_id)
        index += 1
    return case._replace(expected=expected)
