"""Patterns of a wire form, and what must be held back while one of them may still come about.

A pattern is built from a few parts. From each follow regular expressions: of the whole pattern, of
any beginning of it that reaches the end of the text so far, and of the whole pattern where the text
is known to end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import NamedTuple, Protocol, TypeAlias

MAX_SPACE = 64
"""Characters of white space that a pattern may hold in one place."""
MAX_NAME = 128
"""Characters of a name that a model writes, at most."""
STAND_INS = re.compile("[\ud800-\udfff]")
"""What stands for a mark that came as its own token. No text holds such characters."""
SPACE_CHARACTERS = " \t\r\n"
_ASCII = "".join(map(chr, range(128)))


class Reader(Protocol):
    """Says what the engine reads in place of a part."""

    def mark(self, name: str) -> str:
        """In place of a mark."""
        ...

    def literal(self, text: str) -> str:
        """In place of a text: that text."""
        ...


class Regexes(NamedTuple):
    """Sources of regular expressions."""

    whole: str
    beginning: str
    """A beginning, perhaps an empty one, up to the end of the text."""
    last: str
    """The whole pattern, where no more text comes."""
    first: str
    """Like ``beginning``, but of at least one character."""
    longest: int
    """Characters of the longest match."""
    start: str
    """The characters that it may begin with, as they stand within a class."""
    ends: bool = True
    """More text cannot make a match longer."""
    empty: bool = False
    """It may be empty."""


class Literal(NamedTuple):
    """A text as it stands."""

    text: str

    def regexes(self, reader: Reader) -> Regexes:
        return _literal(reader.literal(self.text))


class Mark(NamedTuple):
    """A terminal of the family, by its name in ``Family.marks``."""

    name: str

    def regexes(self, reader: Reader) -> Regexes:
        return _literal(reader.mark(self.name))


class Characters(NamedTuple):
    """``least`` to ``most`` characters of a class, as many as come."""

    inside: str
    """What stands within the brackets of the class."""
    least: int
    most: int
    group: str = ""
    """The name by which an action finds them."""

    def regexes(self, reader: Reader) -> Regexes:
        one = f"[{self.inside}]"
        whole = f"{one}{{{self.least},{self.most}}}"
        first = rf"{one}{{1,{self.most}}}\Z"
        beginning = rf"{one}{{0,{self.most}}}\Z"
        ends = self.least == self.most
        named = f"(?P<{self.group}>{whole})" if self.group else whole
        start = "" if self.inside.startswith("^") else self.inside
        return Regexes(named, beginning, named, first, self.most, start, ends, self.least == 0)


class Ahead(NamedTuple):
    """Something else than white space follows, or nothing at all. It is no part of the match."""

    def regexes(self, reader: Reader) -> Regexes:
        within = re.escape(SPACE_CHARACTERS)
        return Regexes(f"(?=[^{within}])", r"\Z", f"(?![{within}])", r"(?!)", 0, "")


class Sequence(NamedTuple):
    """One part after the other."""

    parts: tuple[Pattern, ...]

    def regexes(self, reader: Reader) -> Regexes:
        parts = [part.regexes(reader) for part in self.parts]
        tail = parts[-1]
        beginning, first, start = tail.beginning, tail.first, tail.start
        for part in reversed(parts[:-1]):
            whole = unnamed(part.whole)
            then = first if part.empty else beginning
            first = f"(?:{part.first}|{whole}{then})"
            beginning = f"(?:{whole}{beginning}|{part.beginning})"
            start = part.start + (start if part.empty else "")
        return Regexes(
            "".join(part.whole for part in parts),
            beginning,
            "".join(part.last for part in parts),
            first,
            sum(part.longest for part in parts),
            start,
            tail.ends,
            all(part.empty for part in parts),
        )


class Group(NamedTuple):
    """A part that an action finds by its name."""

    group: str
    part: Pattern

    def regexes(self, reader: Reader) -> Regexes:
        part = self.part.regexes(reader)
        whole, last = f"(?P<{self.group}>{part.whole})", f"(?P<{self.group}>{part.last})"
        return part._replace(whole=whole, last=last)


class Either(NamedTuple):
    """The first of these that fits."""

    parts: tuple[Pattern, ...]

    def regexes(self, reader: Reader) -> Regexes:
        parts = [part.regexes(reader) for part in self.parts]
        return Regexes(
            _any([part.whole for part in parts]),
            _any([part.beginning for part in parts]),
            _any([part.last for part in parts]),
            _any([part.first for part in parts]),
            max(part.longest for part in parts),
            "".join(part.start for part in parts),
            all(part.ends for part in parts),
            any(part.empty for part in parts),
        )


class Optional(NamedTuple):
    """A part that may be missing."""

    part: Pattern

    def regexes(self, reader: Reader) -> Regexes:
        part = self.part.regexes(reader)
        whole, last = f"(?:{part.whole})?", f"(?:{part.last})?"
        return part._replace(whole=whole, last=last, ends=False, empty=True)


Pattern: TypeAlias = Literal | Mark | Characters | Ahead | Sequence | Group | Either | Optional

SPACE = Characters(re.escape(SPACE_CHARACTERS), 0, MAX_SPACE)


def sequence(*parts: Pattern | str) -> Pattern:
    """One part after the other; a string stands for itself."""
    return Sequence(tuple(Literal(part) if isinstance(part, str) else part for part in parts))


def spaced(*parts: Pattern | str) -> Pattern:
    """Like ``sequence``, with any white space between the parts."""
    between: list[Pattern | str] = []
    for part in parts:
        between += [SPACE, part]
    return sequence(*between[1:])


def either(*parts: Pattern | str) -> Pattern:
    """The first of these that fits; a string stands for itself."""
    return Either(tuple(Literal(part) if isinstance(part, str) else part for part in parts))


def optional(*parts: Pattern | str) -> Pattern:
    """These parts, one after the other, or nothing."""
    return Optional(sequence(*parts))


def name(excluded: str, group: str = "name") -> Pattern:
    """A name: anything but white space, control characters, marks and what is ``excluded``."""
    return Characters(rf"^\s\x00-\x1f\ud800-\udfff{re.escape(excluded)}", 1, MAX_NAME, group)


def possible(sources: Many[Regexes]) -> str:
    """A regular expression that matches where one of the patterns fits or may come to fit. The
    latter is only looked at where the text ends soon: it takes much longer."""
    if not sources:
        return "(?!)"
    wholes = _any([unnamed(one.whole) for one in sources])
    firsts = _any([one.first for one in sources])
    soon = max(one.longest for one in sources)
    return rf"(?:{wholes}|(?=(?s:.{{0,{soon}}}+)\Z){firsts})"


def up_to(start: str, fits: str, idle: str = "") -> str:
    """A regular expression that matches all before the first place where ``fits`` does, which
    begins with one of the characters of ``start``, as they stand within a class."""
    return rf"(?:[^{start}]++|{idle}(?!{fits})[{start}])*+" if start else r"(?s:.)*+"


def idle_starts(sources: Many[Regexes], fits: Callable[[str], object]) -> str:
    """Alternatives that match characters with which the patterns begin, each with ``|`` behind it,
    where the next two say already that none fits or may come to fit. To ask all of the patterns
    takes longer.

    fits: whether one does in a text of two or three characters.
    """
    characters = sorted(set(_ASCII).union(*(one.whole for one in sources)))
    start = "".join(one.start for one in sources)
    found = []
    for first in filter(re.compile(f"[{start}]").match, _ASCII) if start else ():
        seconds = [second for second in characters if fits(first + second)]
        ways = [_none_of(seconds)]
        for second in seconds:
            thirds = [third for third in characters if fits(first + second + third)]
            ways.append(re.escape(second) + _none_of(thirds))
        many = "" if first in seconds else "+"
        found.append(f"{re.escape(first)}{many}(?={'|'.join(ways)})|")
    return "".join(found)


def _none_of(characters: list[str]) -> str:
    """ASCII without these."""
    return rf"[^{re.escape(''.join(characters))}\x80-\U0010ffff]"


def unnamed(source: str) -> str:
    """A regular expression without the names of its groups."""
    return re.sub(r"\(\?P<\w+>", "(?:", source)


def _any(sources: list[str]) -> str:
    return "(?:" + "|".join(sources) + ")"


def _literal(text: str) -> Regexes:
    whole = re.escape(text)
    beginning = r"\Z"
    first = "(?!)"
    for character in reversed(text[:-1]):
        first = f"{re.escape(character)}{beginning}"
        beginning = rf"(?:{first}|\Z)"
    return Regexes(whole, beginning, whole, first, len(text), re.escape(text[0]))
