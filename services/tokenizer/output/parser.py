"""Reads the output of one choice: tokens and their texts in, events out.

The events depend on what came and never on how it was cut: a place is decided only when no more
text can change the decision. What may still become a mark is held back; it is never longer than the
longest pattern of the table. What fits no pattern is content, as it stands; nothing is lost, and
nothing raises.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import TypeAlias

from penstock.protocol.wire.messages.tokens import MAX_CALLS, Content, Reasoning
from penstock.services.tokenizer.output.arguments import CallArguments
from penstock.services.tokenizer.output.budget import Budget
from penstock.services.tokenizer.output.collected import Collected
from penstock.services.tokenizer.output.family import Action, Channel, Scanner
from penstock.services.tokenizer.output.machine import (
    Machine,
    Match,
    ReadyEdge,
    ReadyEdges,
    ReadyExpect,
    ReadyFree,
    ReadyScan,
)
from penstock.services.tokenizer.output.pattern import MAX_SPACE, SPACE_CHARACTERS, STAND_INS
from penstock.services.tokenizer.output.tool_schemas import ToolSchemas

MakeId: TypeAlias = Callable[[int, str], str]
"""The id of a call from its index and the tool's name."""


class OutputParser:
    """The parser of one choice.

    The caller pushes each token with the text that its detokenizer (one that skips no special
    tokens) gave for it, and at the end the detokenizer's rest with the token -1.
    """

    __slots__ = (
        "_arguments", "_budget", "_calls", "_held", "_ids", "_machine", "_make_id", "_named",
        "_out", "_quiet", "_reasons", "_scanner", "_single", "_spare", "_state", "_states",
        "_tokens", "_tools", "ended", "in_reasoning",
    )  # fmt: skip

    def __init__(
        self,
        machine: Machine,
        tools: ToolSchemas,
        make_id: MakeId,
        *,
        in_reasoning: bool = False,
        allowed: frozenset[str] = frozenset(),
        single: bool = False,
    ) -> None:
        """
        Args:
            tools: those that the request declares.
            in_reasoning: the prompt has opened the reasoning.
            allowed: names of tools; calls of others are content. Empty: all are allowed.
            single: the output ends with its first call.
        """
        self._machine = machine
        self._tokens = machine.tokens
        self._states = machine.states
        self._tools = tools
        self._make_id = make_id
        self._named = allowed
        self._single = single
        self.ended = False
        """The call that is the only one has ended: no token belongs to the output any more."""
        self._out = Collected()
        self._arguments: CallArguments | None = None
        self._scanner: Scanner | None = None
        self._budget = Budget()
        self._calls = 0
        self._ids: set[str] = set()
        """Of the calls so far."""
        self._spare = itertools.count(MAX_CALLS)
        """Numbers that no call has."""
        self._held = ""
        self._quiet: Match | None = None
        """Set where a text in which it finds nothing goes out at once …"""
        self._reasons = False
        """… as reasoning, or else as content."""
        self.in_reasoning = in_reasoning and machine.thinks
        """What comes next is reasoning, as far as is known."""
        self._state = machine.states["thinking" if self.in_reasoning else "begin"]

    def push(self, token: int, text: str) -> Content:
        """Take the next token and the text that it brought. Returns what is released."""
        quiet = self._quiet
        if (
            quiet is not None
            and token not in self._tokens
            and quiet(text, 0) is None
            and text.rstrip(SPACE_CHARACTERS) == text
        ):
            return [Reasoning(text)] if self._reasons and text else text
        if self.ended:
            return ""
        mark = self._tokens.get(token)
        if mark is not None:
            text = _replaced(text, *mark)
        if self._held:
            text, self._held = self._held + text, ""
        return self._read(text, final=False)

    def finish(self, *, complete: bool = False) -> Content:
        """The output has ended: release what was held back.

        Args:
            complete: the model has ended it, perhaps within a call, whose arguments are closed
                then; else they stay as far as they came.
        """
        text, self._held = self._held, ""
        return self._read(text, final=True, complete=complete)

    def _read(self, text: str, final: bool, complete: bool = False) -> Content:
        place, end = 0, len(text)
        while place < end and not self.ended:
            state = self._state
            if state.__class__ is ReadyFree:
                place = self._free(state, text, place, final)
            elif state.__class__ is ReadyExpect:
                place = self._expect(state, text, place, final)
            else:
                place = self._scan(state, text, place, final)  # type: ignore[arg-type]
        if final and self._arguments is not None:
            self._end_call(self._arguments, complete)
        state = self._state
        self._quiet = None
        if isinstance(state, ReadyFree) and not self._held and not self.ended:
            self._reasons = state.channel is Channel.REASONING
            if self._reasons or state.channel is Channel.TEXT:
                self._quiet = state.first
        return self._out.take()

    def _end_call(self, arguments: CallArguments, complete: bool) -> None:
        """The output ends within a call."""
        scanner = self._scanner
        if complete:
            if scanner is not None:
                scanner.end()
            arguments.close()
            return
        if scanner is not None:
            scanner.cut()
        arguments.cut()

    def _free(self, state: ReadyFree, text: str, place: int, final: bool) -> int:
        """Read free text from ``place``. Returns where to go on; the end, if the rest is held."""
        end = len(text)
        before = (state.skip_last if final else state.skip)(text, place)
        start = before.end() if before is not None else place
        if start == end:
            self._hold(state, text, place, end, final)
            return end
        edge, match = self._fitting(state.edges, text, start, final)
        if match is not None and edge is not None:
            stop = _without_space(text, place, start) if state.strips else start
            self._put(state.channel, text[place:stop])
            self._follow(edge, match)
            return match.end()
        if edge is not None:
            self._hold(state, text, place, start, final)
            return end
        self._put(state.channel, text[place : start + 1])
        return start + 1

    def _hold(self, state: ReadyFree, text: str, place: int, stop: int, final: bool) -> None:
        """Release free text up to ``stop``, but for white space that an edge would strip."""
        if state.strips and not final:
            stop = _without_space(text, place, stop)
        self._put(state.channel, text[place:stop])
        self._held = text[stop:]

    def _fitting(
        self, state: ReadyEdges, text: str, place: int, final: bool
    ) -> tuple[ReadyEdge | None, re.Match[str] | None]:
        """The edge that fits at ``place`` and its match; without a match, one that may come to
        fit; neither, if none does."""
        number = 0
        if not final:
            soon = len(text) - place <= state.longest
            chosen = (state.choose if soon else state.fits)(text, place)
            if chosen is None or chosen.lastindex is None:
                return None, None
            number = chosen.lastindex - 1
        for edge in state.edges[number:]:
            match = (edge.last if final else edge.whole)(text, place)
            if match is not None:
                if not edge.opens or self._allowed(edge, match):
                    return edge, match
            elif not final and edge.beginning(text, place) is not None:
                return edge, None
        return None, None

    def _expect(self, state: ReadyExpect, text: str, place: int, final: bool) -> int:
        edge, match = self._fitting(state.edges, text, place, final)
        if match is not None and edge is not None:
            self._follow(edge, match)
            return match.end()
        if edge is not None:
            self._held = text[place:]
            return len(text)
        for action in state.actions:
            self._act(action, None)
        self._enter(state.otherwise)
        return place

    def _scan(self, state: ReadyScan, text: str, place: int, final: bool) -> int:
        scanner = self._scanner
        if scanner is None:  # the table never leads here without a call
            self._enter("content")
            return place
        place = scanner.feed(text, place, final)
        if scanner.done:
            self._scanner = None
            self._enter(state.to)
            return place
        if place == len(text):
            return place
        if state.quote is not None:
            match = state.quote.whole(text, place)
            if match is not None:
                scanner.quote(match[0])  # type: ignore[attr-defined]  # a QuotedScanner
                return match.end()
            if not final and state.quote.beginning(text, place) is not None:
                self._held = text[place:]
                return len(text)
        by_text = STAND_INS.match(text, place) is None
        if not (by_text and getattr(scanner, "quoted", False)):
            edge, match = self._fitting(state.edges, text, place, final)
            if match is not None and edge is not None:
                scanner.cut()
                self._scanner = None
                self._follow(edge, match)
                return match.end()
            if edge is not None:
                self._held = text[place:]
                return len(text)
        scanner.skip(text[place])
        return place + 1

    def _put(self, channel: Channel, text: str) -> None:
        if not text or channel is Channel.NOTHING:
            return
        text = self._machine.restore(text)
        if channel is Channel.TEXT:
            self._out.text(text)
        elif channel is Channel.REASONING:
            self._out.reasoning(text)
        elif self._arguments is not None:
            self._arguments.value(text)

    def _allowed(self, edge: ReadyEdge, match: re.Match[str]) -> bool:
        """Whether this call may open."""
        if self._calls == MAX_CALLS or (self._named and match["name"] not in self._named):
            return False
        if self._machine.family.declared_only or Action.DECLARED in edge.actions:
            return match["name"] in self._tools
        return True

    def _follow(self, edge: ReadyEdge, match: re.Match[str]) -> None:
        if not self._budget.spend():
            self._act(Action.END, None)
            self._put(Channel.TEXT, match[0])
            self._enter("rest")
            return
        for action in edge.actions:
            self._act(action, match)
        self._enter(edge.to)

    def _enter(self, name: str) -> None:
        if self._calls == MAX_CALLS and name in ("begin", "content"):
            name = "rest"
        state = self._state = self._states[name]
        self.in_reasoning = name == "thinking" or (
            state.__class__ is ReadyFree and state.channel is Channel.REASONING
        )
        if state.__class__ is ReadyScan and self._arguments is not None:
            target = self._arguments.discarded() if state.discards else self._arguments
            self._scanner = state.scanner(target, state.stops)

    def _act(self, action: Action, match: re.Match[str] | None) -> None:
        arguments = self._arguments
        if action is Action.CALL and match is not None:
            if arguments is not None:
                arguments.close()
            if self._single and self._calls:
                self.ended = True
            else:
                self._open(match)
        elif arguments is None or action is Action.DECLARED:
            return
        elif action is Action.VALUE_END:
            arguments.end_value()
        elif action is Action.END:
            arguments.close()
            self._arguments = None
            self.ended = self._single
        elif match is not None:
            arguments.key(match["key"], action)

    def _open(self, match: re.Match[str]) -> None:
        name = match["name"]
        groups = match.groupdict()
        call_id = groups.get("id") or self._make_id(self._calls, name)
        if call_id in self._ids:
            call_id = self._unused_id(call_id, name)
        self._ids.add(call_id)
        self._out.opened(self._calls, call_id, name)
        self._arguments = CallArguments(
            self._out, self._calls, self._tools.of(name), self._machine, self._budget
        )
        self._calls += 1

    def _unused_id(self, written: str, name: str) -> str:
        """In place of one that the model has written twice: results could not be told apart."""
        numbers = itertools.chain((self._calls,), itertools.islice(self._spare, len(self._ids)))
        made = (self._make_id(number, name) for number in numbers)
        return next((one for one in made if one not in self._ids), written)


def _replaced(text: str, literal: str, stand_in: str) -> str:
    """The text of a mark's token with what the engine reads in its place. It ends with the mark;
    before it may stand what the detokenizer had held back."""
    place = text.rfind(literal)
    if place < 0:
        return text
    return text[:place] + stand_in + text[place + len(literal) :]


def _without_space(text: str, place: int, end: int) -> int:
    """Where the white space before ``end`` begins, ``MAX_SPACE`` characters of it at most."""
    least = max(place, end - MAX_SPACE)
    return least + len(text[least:end].rstrip(SPACE_CHARACTERS))
