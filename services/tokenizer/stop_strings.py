"""Stop strings: find the first one to be completed, and hold back what may still become one.

The text is read once, character by character, by the automaton of Aho and Corasick ("Efficient
string matching", 1975): its state is the longest end of the text that is a beginning of a stop
string, which is exactly what must be held back. So the cost is linear in the text, whatever the
stop strings, and the result does not depend on how the text was cut into pieces.

The stop string that is completed first wins: nothing after its last character is ever looked at.
Of several that end at the same character, the longest wins, which is the one that begins first.
"""

from __future__ import annotations

import re
from functools import lru_cache


class StopAutomaton:
    """The automaton of a set of stop strings; shared by all choices that have the same ones."""

    __slots__ = ("depth", "failure", "first", "found", "next")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        """Characters of the beginning that a state stands for."""
        self.found: list[str | None] = [None]
        """Longest stop string that ends in a state."""
        for stop in stops:
            self._add(stop)
        self.failure = [0] * len(self.next)
        self._link()
        firsts = "".join(re.escape(character) for character in self.next[0])
        self.first = re.compile(f"[{firsts}]" if firsts else "(?!)").search
        """Finds the next character that begins a stop string."""

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self.next[state].get(character)
            if following is None:
                following = len(self.next)
                self.next[state][character] = following
                self.next.append({})
                self.depth.append(self.depth[state] + 1)
                self.found.append(None)
            state = following
        self.found[state] = stop

    def _link(self) -> None:
        """Failure links, breadth first: where to go on when the next character does not fit."""
        queue = list(self.next[0].values())
        for state in queue:
            for character, following in self.next[state].items():
                queue.append(following)
                fallback = self.failure[state]
                while fallback and character not in self.next[fallback]:
                    fallback = self.failure[fallback]
                target = self.next[fallback].get(character, 0)
                self.failure[following] = target
                if self.found[following] is None:
                    self.found[following] = self.found[target]

    def step(self, state: int, character: str) -> int:
        following = self.next[state].get(character)
        while following is None:
            if not state:
                return 0
            state = self.failure[state]
            following = self.next[state].get(character)
        return following


@lru_cache(maxsize=16)
def stop_automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton for these stop strings, kept for the other choices of the same request."""
    return StopAutomaton(stops)


class StopStrings:
    """Watches the text of one choice. ``found`` is the stop string once one is complete."""

    __slots__ = ("_automaton", "_held", "_include", "_state", "found")

    def __init__(self, stops: list[str], include: bool = False) -> None:
        """include: the stop string is part of the text."""
        self._automaton = stop_automaton(tuple(stops))
        self._include = include
        self._state = 0
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Take more text; return what can be released. After ``found``, nothing more comes."""
        automaton = self._automaton
        state = self._state
        if not state and automaton.first(text) is None:
            return text
        position, end = 0, len(text)
        while position < end:
            if not state:
                start = automaton.first(text, position)
                if start is None:
                    break
                position = start.start()
            state = automaton.step(state, text[position])
            position += 1
            found = automaton.found[state]
            if found is not None:
                return self._stopped(self._held + text[:position], found)
        self._state = state
        if not state:
            text, self._held = self._held + text, ""
            return text
        text = self._held + text
        cut = len(text) - automaton.depth[state]
        self._held = text[cut:]
        return text[:cut]

    def _stopped(self, text: str, found: str) -> str:
        self.found = found
        self._held = ""
        self._state = 0
        return text if self._include else text[: len(text) - len(found)]

    @property
    def held(self) -> int:
        """Characters that are held back."""
        return len(self._held)

    def flush(self) -> str:
        """The end of the text: nothing can complete a stop string any more."""
        text, self._held = self._held, ""
        self._state = 0
        return text
