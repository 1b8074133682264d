"""Reads arguments as a call has them: ``a=1, b=['x', {'k': True}])`` or ``a:1,b:[…]}``.

Literals are those of Python and of JSON alike. Nothing is evaluated. Strings of the top level go
out as they come, any other value when it is whole. What is no literal is a string.

Models are trained on templates that put strings between quotes without escaping them, as in
``'it's'``. So a quote ends a string only where a comma, a colon or a bracket follows, perhaps
behind white space.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.services.tokenizer.output.call_expressions import (
    all_before,
    ending,
    inside,
    regexes,
)
from penstock.services.tokenizer.output.conversion import quoted
from penstock.services.tokenizer.output.escapes import unescaped
from penstock.services.tokenizer.output.family import Action, Arguments, Stops
from penstock.services.tokenizer.output.literals import PREFIXES, end_of_space, json_literal

_MAX_DEPTH = 64
"""Brackets within brackets."""
_CLOSING = {"[": "]", "(": ")", "{": "}"}


class Syntax(NamedTuple):
    """How the arguments of a call are written."""

    close: str
    """The bracket that ends them; the opening one stands before them."""
    quotes: str = "\"'"
    """Characters between which strings stand, beside the state's own quote."""


PYTHON = Syntax(")")


class CallScanner:
    """Reads arguments up to the bracket that closes the call.

    Where something does not fit the syntax at all, the rest goes out as it stands, up to one of the
    state's edges.
    """

    __slots__ = (
        "_arguments", "_chunks", "_held", "_mark_string", "_open", "_pieces", "_quote", "_raw_part",
        "_read", "_regexes", "_stack", "_stopped", "_stops", "_syntax", "done",
    )  # fmt: skip

    def __init__(self, arguments: Arguments, stops: Stops, syntax: Syntax = PYTHON) -> None:
        self._syntax = syntax
        self._arguments = arguments
        self._stops = stops
        self._raw_part = all_before(stops, stops.edges, stops.idle)
        self._mark_string = all_before(
            rf"{stops}\ud800-\udfff", rf"{stops.quote}|[\ud800-\udfff]", stops.idle
        )
        self._regexes = regexes(stops)
        self._stack: list[str] = []
        """What closes the brackets that are open."""
        self._read = self._key
        self._chunks: list[str] = []
        """Of the key, word or string that is read."""
        self._pieces: list[str] = []
        """JSON of the value that is read."""
        self._quote = ""
        """What ends the string that is open; "mark": the state's own quote."""
        self._open = False
        """The string that is open is a parameter's value, and goes out as it comes."""
        self._held = ""
        self._stopped = False
        self.done = False

    @property
    def quoted(self) -> bool:
        """What comes is the inside of a string."""
        return bool(self._quote)

    def feed(self, text: str, start: int, final: bool) -> int:
        """Read from ``start`` on; see ``Scanner``."""
        place, shift = start, 0
        if self._held:
            shift = start - len(self._held)
            text, place, self._held = self._held + text[start:], 0, ""
        end = len(text)
        self._stopped = False
        while place < end and not self.done and not self._stopped:
            place = self._read(text, place)
        return place + shift

    def quote(self, text: str) -> None:
        """The state's own quote stands where ``feed`` stopped."""
        if self._quote == "mark":
            self._end_string()
        elif self._quote or self._read not in (self._key, self._value):
            self.skip(text)
        else:
            self._begin_string("mark")

    def skip(self, character: str) -> None:
        """What stands where ``feed`` stopped is text like any other."""
        within = self._arguments.spend()
        if self._quote:
            self._put(character)
        elif self._read in (self._key, self._value):
            self._chunks.append(character)
            self._read = self._word if self._read == self._value else self._name
        elif self._read in (self._word, self._name):
            self._chunks.append(character)
        else:
            self._break(character)
        if not within and not self._quote:
            self._break("")

    def cut(self) -> None:
        """What is held back goes out as it stands."""
        if self._held and not self._held.startswith(self._quote or "\0"):
            self._put(unescaped(self._held))
        self._held = ""
        if self._quote and not self._open:
            self._pieces.append(quoted("".join(self._chunks))[:-1])
            self._chunks.clear()
        self._pieces += self._chunks
        self._chunks.clear()
        self._arguments.value("".join(self._pieces))
        self._pieces.clear()

    def end(self) -> None:
        """The string, the brackets and the call that are open are closed; a name without a value is
        dropped."""
        closing = ""
        if self._read in (self._name, self._key_string, self._assign):
            self._quote = self._held = ""
            self._chunks.clear()
            self._read = self._after
        elif self._read == self._value:
            if not self._stack:
                self._pieces.clear()
            elif self._stack[-1] == "}":
                self._pieces.append("null")
            self._read = self._after
        elif self._quote == "mark":
            self._end_string()
        elif self._quote and not self._held.startswith(self._quote):
            self._put(unescaped(self._held))
            closing, self._held = self._quote, ""
        if self._read != self._raw:
            closing += "".join(reversed(self._stack)) + self._syntax.close
            self.feed(closing, 0, True)
        if not self.done:
            self.cut()

    def _key(self, text: str, place: int) -> int:
        """Where a name or the end of an object may stand."""
        place = end_of_space(text, place)
        if place == len(text) or self._too_many():
            return place
        character = text[place]
        if character == (self._stack[-1] if self._stack else self._syntax.close):
            return self._close(place)
        if character == ",":
            return place + 1
        if character in self._syntax.quotes:
            self._begin_string(character)
            return place + 1
        if self._stops_at(character):
            return place
        self._read = self._name
        return place

    def _name(self, text: str, place: int) -> int:
        found = self._regexes.key.match(text, place)
        end = found.end() if found is not None else place
        if end > place:
            self._chunks.append(text[place:end])
        if end == len(text):
            return end
        if text[end] != self._syntax.close and self._stops_at(text[end]):
            return end
        if not self._chunks:
            return self._break(text[end]) or end + 1
        self._read = self._assign
        return end

    def _assign(self, text: str, place: int) -> int:
        """Behind a name."""
        place = end_of_space(text, place)
        if place == len(text):
            return place
        if text[place] not in "=:":
            if text[place] != self._syntax.close and self._stops_at(text[place]):
                return place
            name, self._chunks = "".join(self._chunks), []
            self._break(name)
            return place
        name, self._chunks = "".join(self._chunks), []
        if self._stack:
            self._pieces.append(quoted(name) + ": ")
        else:
            self._pieces.append(name)
        self._read = self._value
        return place + 1

    def _value(self, text: str, place: int) -> int:
        place = end_of_space(text, place)
        if place == len(text) or self._too_many():
            return place
        character = text[place]
        if character in self._syntax.quotes:
            self._begin_string(character)
            return place + 1
        if character in _CLOSING:
            return self._bracket(character, place)
        if self._stack and character == self._stack[-1]:
            return self._close(place)
        if self._stops_at(character):
            return place
        if character in ",)]}":
            return self._break(character) or place + 1
        self._read = self._word
        return place

    def _word(self, text: str, place: int) -> int:
        found = self._regexes.word.match(text, place)
        end = found.end() if found is not None else place
        if end > place:
            self._chunks.append(text[place:end])
        if end == len(text):
            return end
        character = text[end]
        if character in self._syntax.quotes:
            if len(self._chunks) == 1 and self._chunks[0] in PREFIXES:
                self._chunks.clear()
                self._begin_string(character)
            elif not self._too_many():
                self._chunks.append(character)
            return end + 1
        if character in ",)]}":
            word, self._chunks = "".join(self._chunks).strip(), []
            self._put_word(word)
            self._read = self._after
            return end
        if self._stops_at(character):
            return end
        word, self._chunks = "".join(self._chunks), []
        return self._break(word + character) or end + 1

    def _put_word(self, word: str) -> None:
        """A value that is no string by its quotes."""
        json = json_literal(word)
        if self._stack:
            self._pieces.append(quoted(word) if json is None else json)
            return
        name = self._pieces.pop()
        self._arguments.key(name, Action.KEY if json is None else Action.KEY_JSON)
        self._arguments.value(word if json is None else json)
        self._arguments.end_value()

    def _bracket(self, character: str, place: int) -> int:
        if len(self._stack) == _MAX_DEPTH:
            return self._break(character) or place + 1
        if not self._stack:
            self._arguments.key(self._pieces.pop(), Action.KEY_JSON)
        self._stack.append(_CLOSING[character])
        self._pieces.append("{" if character == "{" else "[")
        self._read = self._key if character == "{" else self._value
        return place + 1

    def _close(self, place: int) -> int:
        """The innermost bracket closes, or the call."""
        if not self._stack:
            self.done = True
            self._arguments.close()
            return place + 1
        if self._pieces[-1] == ", ":
            self._pieces.pop()
        self._pieces.append("}" if self._stack.pop() == "}" else "]")
        if not self._stack:
            self._arguments.value("".join(self._pieces))
            self._arguments.end_value()
            self._pieces.clear()
        self._read = self._after
        return place + 1

    def _after(self, text: str, place: int) -> int:
        """Behind a value."""
        place = end_of_space(text, place)
        if place == len(text):
            return place
        character = text[place]
        closing = self._stack[-1] if self._stack else self._syntax.close
        if character == closing:
            return self._close(place)
        if character == ",":
            if self._stack:
                self._pieces.append(", ")
            in_list = self._stack and closing != "}"
            self._read = self._value if in_list else self._key
            return place + 1
        if self._stops_at(character):
            return place
        return self._break(character) or place + 1

    def _begin_string(self, quote: str) -> None:
        self._quote = quote
        self._open = not self._stack and self._read != self._key
        if self._open:
            self._arguments.key(self._pieces.pop(), Action.KEY_STRING)
        is_key = self._read == self._key
        self._read = self._key_string if is_key else self._string

    def _string(self, text: str, place: int) -> int:
        """Within a string."""
        if self._quote == "mark":
            found = self._mark_string(text, place)
            end = found.end() if found is not None else place
            self._put(text[place:end])
            self._stopped = True
            return end
        match = inside(self._quote).match(text, place)
        end = match.end() if match is not None else place
        if end > place:
            self._put(unescaped(text[place:end]))
        if end == len(text):
            return end
        if text[end] == self._quote and ending(self._quote).match(text, end) is not None:
            self._end_string()
            return end + 1
        if "\ud800" <= text[end] <= "\udfff":
            self._stopped = True
            return end
        self._held = text[end:]
        return len(text)

    def _key_string(self, text: str, place: int) -> int:
        return self._string(text, place)

    def _put(self, text: str) -> None:
        if self._open:
            self._arguments.value(text)
        else:
            self._chunks.append(text)

    def _end_string(self) -> None:
        self._quote = ""
        if self._open:
            self._open = False
            self._arguments.end_value()
            self._read = self._after
        elif self._read == self._key_string:
            self._read = self._assign
        else:
            self._pieces.append(quoted("".join(self._chunks)))
            self._chunks.clear()
            self._read = self._after

    def _too_many(self) -> bool:
        if self._arguments.spend():
            return False
        self._break("")
        return True

    def _stops_at(self, character: str) -> bool:
        """Whether the engine must see this character first."""
        self._stopped = character in self._stops or "\ud800" <= character <= "\udfff"
        return self._stopped

    def _break(self, text: str) -> int:
        """What comes does not fit the syntax. Returns 0."""
        self.cut()
        self._arguments.end_value()
        self._quote = ""
        self._arguments.write(text)
        self._read = self._raw
        return 0

    def _raw(self, text: str, place: int) -> int:
        """The rest, as it stands."""
        found = self._raw_part(text, place)
        end = found.end() if found is not None else place
        self._arguments.write(text[place:end])
        self._stopped = True
        return end
