"""A family's table made ready for a vocabulary: regular expressions instead of patterns.

What the engine reads is text in which a mark that came as its own token is one character of those
that no text can hold (lone surrogates). So marks by id and marks by text are matched alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from penstock.services.tokenizer.output.family import (
    Action,
    Channel,
    Edge,
    Expect,
    Family,
    Free,
    MakeScanner,
    Scan,
    State,
    Stops,
)
from penstock.services.tokenizer.output.pattern import (
    SPACE,
    STAND_INS,
    Ahead,
    Mark,
    Regexes,
    idle_starts,
    possible,
    sequence,
    unnamed,
    up_to,
)

_FIRST_STAND_IN = 0xD800
_NOWHERE = r"\ud800(?!)"
"""Matches nowhere. A search for a single character is the fastest there is."""
_THINK_OPEN, _THINK_CLOSE = "think_open", "think_close"

Match: TypeAlias = Callable[[str, int], "re.Match[str] | None"]


class Vocabulary:
    """The added tokens of a tokenizer, by their texts. Compared by identity: make one a model."""

    def __init__(self, added: Mapping[str, int], special: frozenset[int] = frozenset()) -> None:
        """special: ids that are no text for a client that skips special tokens."""
        self.added = dict(added)
        self.special = special


class ReadyEdge(NamedTuple):
    whole: Match
    beginning: Match
    last: Match
    to: str
    actions: tuple[Action, ...]
    opens: bool
    """It opens a call."""


class ReadyEdges(NamedTuple):
    edges: tuple[ReadyEdge, ...]
    fits: Match
    """Matches where an edge fits; ``lastindex`` is the number of the first …"""
    choose: Match
    """… and where one fits or may come to fit, which takes much longer."""
    longest: int
    """Characters of the longest match: where more follow, no edge may come to fit."""


class ReadyFree(NamedTuple):
    channel: Channel
    strips: bool
    first: Match
    """Finds the next character that may begin an edge."""
    skip: Match
    """Matches up to where an edge fits, or may come to fit."""
    skip_last: Match
    edges: ReadyEdges


class ReadyExpect(NamedTuple):
    edges: ReadyEdges
    otherwise: str
    actions: tuple[Action, ...]


class ReadyScan(NamedTuple):
    scanner: MakeScanner
    stops: Stops
    to: str
    edges: ReadyEdges
    discards: bool
    quote: ReadyEdge | None


ReadyState: TypeAlias = ReadyFree | ReadyExpect | ReadyScan


class Machine:
    """A family for a vocabulary, shared by all choices that read it alike."""

    def __init__(
        self, family: Family, vocabulary: Vocabulary, tools: bool, reasoning: bool, skips: bool
    ) -> None:
        self.family = family
        states = _all_states(family, vocabulary, tools, reasoning)
        marks = dict(family.marks)
        if family.reasoning is not None:
            marks |= {_THINK_OPEN: family.reasoning.open, _THINK_CLOSE: family.reasoning.close}
        used = _Used(marks, vocabulary)
        self.thinks = "thinking" in states
        """Reasoning is told from content."""
        self.states = {name: _ready(state, used) for name, state in states.items()}
        self.tokens: dict[int, tuple[str, str]] = dict(used.stand_ins)
        """Token id → its text, and what the engine reads in its place."""
        if skips:
            skipped = vocabulary.special - self.tokens.keys()
            for text, number in vocabulary.added.items():
                if number in skipped and not any(text in literal for literal in used.texts):
                    self.tokens[number] = (text, "")
        self.texts = {stand_in: text for text, stand_in in used.stand_ins.values()}
        """Stand-in → the mark's text."""

    def restore(self, text: str) -> str:
        """A text with its marks as they are written."""
        if not self.texts or text.isascii() or STAND_INS.search(text) is None:
            return text
        return STAND_INS.sub(lambda found: self.texts.get(found[0], found[0]), text)


@lru_cache(maxsize=64)
def build_machine(
    family: Family,
    vocabulary: Vocabulary,
    *,
    tools: bool = True,
    reasoning: bool = True,
    skips_special: bool = True,
) -> Machine:
    """The machine, made once for each family, vocabulary and set of switches.

    Args:
        tools: calls are parsed; a request without tools has text alone.
        reasoning: reasoning is told from content.
        skips_special: special tokens that are none of the family's marks stand for nothing.
    """
    return Machine(family, vocabulary, tools, reasoning, skips_special)


class _Used:
    """The marks that a machine uses, and the texts in which special tokens may be parts."""

    def __init__(self, marks: Mapping[str, str], vocabulary: Vocabulary) -> None:
        self._marks = marks
        self._added = vocabulary.added
        self.stand_ins: dict[int, tuple[str, str]] = {}
        self.texts: set[str] = set()

    def literal(self, text: str) -> str:
        self.texts.add(text)
        return text

    def mark(self, name: str) -> str:
        text = self._marks[name]
        number = self._added.get(text)
        if number is None:
            return self.literal(text)
        if number not in self.stand_ins:
            stand_in = chr(_FIRST_STAND_IN + len(self.stand_ins))
            self.stand_ins[number] = (text, stand_in)
        return self.stand_ins[number][1]


def _all_states(
    family: Family, vocabulary: Vocabulary, tools: bool, reasoning: bool
) -> dict[str, State]:
    """The family's states and those that all families share."""
    own = tools or (reasoning and family.channels)
    openers = family.openers if own else ()
    thinks = reasoning and family.reasoning is not None
    label = family.reasoning.label if family.reasoning is not None else ""
    opening = sequence(Mark(_THINK_OPEN), label) if label else Mark(_THINK_OPEN)
    think = Edge(sequence(SPACE, opening), "thinking")
    end = Edge(Mark(_THINK_CLOSE), "thought")
    begin, content, after = list[Edge](), list(openers), list[Edge]()
    answer = family.begin if own else ()
    if thinks and family.reasoning is not None:
        begin.append(think)
        # An answer may speak of the mark; only a token of its own is meant as one.
        if family.reasoning.open in vocabulary.added:
            content.append(Edge(opening, "thinking"))
        after.append(Edge(sequence(SPACE, Mark(_THINK_CLOSE)), "thought"))
    after.append(Edge(sequence(SPACE, Ahead()), "begin"))
    states: dict[str, State] = {
        "begin": Expect((*begin, *answer)),
        "content": Free(Channel.TEXT, tuple(content), strips=bool(openers)),
        "after": Expect(tuple(after), "begin"),
        "rest": Free(Channel.TEXT, ()),
    }
    if thinks:
        then = "answer" if answer else "content"
        states["answer"] = Expect(answer)
        states["thought"] = Expect((Edge(sequence(SPACE, Ahead()), then),), then)
        states["thinking"] = Expect((Edge(sequence(SPACE, Ahead()), "reasoning"),), "reasoning")
        states["reasoning"] = Free(Channel.REASONING, (end, *openers), strips=True)
    if own:
        states |= family.states
    if family.channels:
        states = {name: _switched(state, tools, reasoning) for name, state in states.items()}
    return states


def _switched(state: State, tools: bool, reasoning: bool) -> State:
    """A state of a family with channels of its own, without calls or without reasoning."""
    if not tools:
        edges = tuple(edge for edge in state.edges if Action.CALL not in edge.actions)
        state = state._replace(edges=edges)
    if not reasoning and isinstance(state, Free) and state.channel is Channel.REASONING:
        state = state._replace(channel=Channel.TEXT)
    return state


def _ready(state: State, used: _Used) -> ReadyState:
    sources = [edge.pattern.regexes(used) for edge in state.edges]
    edges = _ready_edges(state.edges, sources)
    start = "".join(one.start for one in sources)
    fits = possible(sources)
    match state:
        case Free():
            idle = idle_starts(sources, lambda text: edges.choose(text, 0))
            return ReadyFree(
                state.channel,
                state.strips,
                re.compile(f"[{start}]" if start else _NOWHERE).search,
                re.compile(up_to(start, fits, idle)).match,
                re.compile(up_to(start, "|".join(unnamed(one.last) for one in sources))).match,
                edges,
            )
        case Expect():
            return ReadyExpect(edges, state.otherwise, state.actions)
        case Scan():
            quote, quotes = None, list[Regexes]()
            if state.quote is not None:
                quotes = [state.quote.regexes(used)]
                quote = _ready_edge(Edge(state.quote, ""), quotes[0])
            stops = Stops(start + "".join(one.start for one in quotes))
            stops.edges, stops.quote = fits, possible(quotes)
            may_stop = re.compile(f"{fits}|{stops.quote}").match
            stops.idle = idle_starts(sources + quotes, may_stop)
            return ReadyScan(state.scanner, stops, state.to, edges, state.discards, quote)


def _ready_edges(edges: tuple[Edge, ...], sources: list[Regexes]) -> ReadyEdges:
    fits = [f"({unnamed(one.whole)})" for one in sources] or ["(?!)"]
    chosen = [f"({unnamed(one.whole)}|{one.beginning})" for one in sources] or ["(?!)"]
    return ReadyEdges(
        tuple(map(_ready_edge, edges, sources)),
        re.compile("|".join(fits)).match,
        re.compile("|".join(chosen)).match,
        max((one.longest for one in sources), default=0),
    )


def _ready_edge(edge: Edge, regexes: Regexes) -> ReadyEdge:
    if not regexes.ends:
        raise ValueError(f"the pattern of an edge to {edge.to!r} has no definite end")
    return ReadyEdge(
        re.compile(regexes.whole).match,
        re.compile(regexes.beginning).match,
        re.compile(regexes.last).match,
        edge.to,
        edge.actions,
        Action.CALL in edge.actions,
    )
