"""Which wire family reads a model's output: from its chat template and its vocabulary, or by name.

The rules of ``tool_rules`` and ``reasoning_rules`` are tried one after the other, first all of them
on the template, then on the vocabulary: a model fine-tuned to another form keeps the tokens of its
base, while its template says what it was trained on last.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

from penstock.services.tokenizer.output.detection_rules import (
    REASONING_NAMES,
    REASONING_RULES,
    TOOL_NAMES,
    TOOL_RULES,
    Rule,
)
from penstock.services.tokenizer.output.families import FAMILIES
from penstock.services.tokenizer.output.family import Family, ReasoningMarks
from penstock.services.tokenizer.output.response_template import (
    BadResponseTemplate,
    read_response_template,
)

AUTO, NONE = "auto", "none"
_DEFAULT = "json_tags"
Value = TypeVar("Value")


class UnknownParser(ValueError):
    """A name that no parser has."""


class Clues(NamedTuple):
    """What is known of a model."""

    template: str | None
    """Source of its chat template."""
    added: Collection[str]
    """Texts of the tokens that were added to its vocabulary."""
    response_template: Any = None
    """What its ``tokenizer_config.json`` says under that name."""


class OutputForm(NamedTuple):
    """How a model's output is read."""

    family: Family
    tool_reason: str
    reasoning_reason: str

    def describe(self) -> str:
        """One line for the log."""
        marks = self.family.reasoning
        thinking = "channels" if self.family.channels else "none"
        if marks is not None:
            thinking = f"{marks.open} … {marks.close}"
        return (
            f"tool parser {self.family.name}: {self.tool_reason}; "
            f"thinking {thinking}: {self.reasoning_reason}"
        )


def choose(clues: Clues, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> OutputForm:
    """The form of a model's output.

    Args:
        tool_parser: ``auto``, ``none``, the name of a family, or the name by which vLLM or SGLang
            know it.
        reasoning_parser: the same for thinking.

    Raises:
        UnknownParser: for a name that is none of these.
    """
    refusal = ""
    if tool_parser == AUTO and clues.response_template is not None:
        try:
            family = read_response_template(clues.response_template, clues.added)
        except BadResponseTemplate as error:
            refusal = f" (the checkpoint's response_template is not read: {error})"
        else:
            why = "the checkpoint's response_template"
            if reasoning_parser == AUTO:
                return OutputForm(family, why, why)
            marks, reason = _reasoning(clues, reasoning_parser, family)
            return OutputForm(with_reasoning(family, marks), why, reason)
    family, tool_reason = _tools(clues, tool_parser)
    marks, reasoning_reason = _reasoning(clues, reasoning_parser, family)
    return OutputForm(with_reasoning(family, marks), tool_reason + refusal, reasoning_reason)


@lru_cache(maxsize=256)
def with_reasoning(family: Family, marks: ReasoningMarks | None) -> Family:
    """The family with other marks of reasoning; the same object for the same marks."""
    return family if family.reasoning == marks else replace(family, reasoning=marks)


def _tools(clues: Clues, name: str) -> tuple[Family, str]:
    if name == NONE:
        return _PLAIN, "--tool-parser none"
    if name != AUTO:
        known = dict(TOOL_NAMES) | {family: family for family in FAMILIES}
        return FAMILIES[_named(name, known, "tool")], f"--tool-parser {name}"
    found = _first(TOOL_RULES, clues)
    if found is None:
        return FAMILIES[_DEFAULT], "no rule fits the template or the vocabulary"
    if found.value == NONE:
        return _PLAIN, f"{found.why}, whose calls are not read"
    return FAMILIES[found.value], found.why


def _reasoning(clues: Clues, name: str, family: Family) -> tuple[ReasoningMarks | None, str]:
    if family.channels:
        return None, "the family's own channels"
    if name == NONE:
        return None, "--reasoning-parser none"
    if name != AUTO:
        return _named(name, REASONING_NAMES, "reasoning"), f"--reasoning-parser {name}"
    found = _first(REASONING_RULES, clues)
    if found is None:
        return None, "no rule fits the template or the vocabulary"
    return found.value, found.why


class _Found(NamedTuple, Generic[Value]):
    value: Value
    why: str


def _first(rules: tuple[Rule[Value], ...], clues: Clues) -> _Found[Value] | None:
    template = clues.template or ""
    for rule in rules:
        if rule.template and _stands(rule, template):
            return _Found(rule.value, f"the template writes {_and(rule.template)}")
    for rule in rules:
        if rule.vocabulary and all(text in clues.added for text in rule.vocabulary):
            return _Found(rule.value, f"the vocabulary has {_and(rule.vocabulary)}")
    return None


def _stands(rule: Rule[Value], template: str) -> bool:
    return all(text in template for text in rule.template) and not any(
        text in template for text in rule.without
    )


def _and(texts: tuple[str, ...]) -> str:
    return " and ".join(texts)


def _named(name: str, known: Mapping[str, Value], what: str) -> Value:
    """What a name stands for, however it is spelt. Raises ``UnknownParser``."""
    spelt = {_bare(one): one for one in known}
    found = spelt.get(_bare(name))
    if found is not None:
        return known[found]
    close = difflib.get_close_matches(_bare(name), list(spelt), 1, 0.6)
    hint = f"; did you mean {spelt[close[0]]!r}?" if close else "."
    raise UnknownParser(
        f"there is no {what} parser {name!r}{hint} Known are auto, none, {', '.join(sorted(known))}"
    )


def _bare(name: str) -> str:
    """A name without what people spell differently."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


_PLAIN = Family(name="none", marks={}, openers=(), reasoning=None)
