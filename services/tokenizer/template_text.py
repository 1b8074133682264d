"""Text that remembers which of its characters a chat template wrote.

A rendered chat holds the template's control tokens and whatever users wrote. What a user wrote
must never be read as a control token, however a template cuts, joins, replaces or recases it. So
the template's own characters are known one by one: ``TemplateText`` is a ``str`` that carries a
mask of them through the operations that templates use. Every other ``str`` is a user's, and so is
the result of an operation that keeps no mask: what is lost counts as a user's, never as the
template's. As a value, text is always exactly what plain ``str`` operations give.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from string import Formatter
from typing import Any, SupportsIndex

from jinja2.sandbox import SandboxedEnvironment, SandboxedFormatter

from penstock.services.tokenizer.template_limits import bound_format

_CONVERSION = re.compile(r"%(?:\((?P<key>[^)]*)\))?[#0 +-]*\d*(?:\.\d+)?[hlL]?[a-zA-Z%]")
_OWN = b"\1"
_MISSING = object()


def own_mask(text: str) -> bytes:
    """One byte for each character: 1 where the template wrote it."""
    return text._own if isinstance(text, TemplateText) else bytes(len(text))


def written(text: str) -> TemplateText:
    """Text that the template wrote."""
    return TemplateText(text, _OWN * len(text))


def joined(pieces: Iterable[str]) -> str:
    """The pieces in one, each character still its writer's."""
    pieces = list(pieces)
    return _masked("".join(pieces), b"".join(map(own_mask, pieces)))


def plain(text: str) -> str:
    """An ordinary ``str``."""
    return str.__str__(text)


def _masked(text: str, own: bytes) -> str:
    return TemplateText(text, own) if _OWN in own else text


class TemplateText(str):
    """A ``str`` of which the template wrote some characters. Methods that are not overridden give
    plain text, which counts as a user's."""

    __slots__ = ("_own",)
    _own: bytes

    def __new__(cls, text: str, own: bytes | None = None) -> TemplateText:
        """own: the mask; ``None``: the template wrote nothing of it."""
        self = super().__new__(cls, text)
        self._own = bytes(len(text)) if own is None else own
        return self

    def _cut(self, begin: int, end: int) -> str:
        return _masked(str.__getitem__(self, slice(begin, end)), self._own[begin:end])

    def _cuts(self, pieces: Sequence[str], gap: int) -> list[str]:
        """Pieces that follow each other at a distance of ``gap``."""
        at, cuts = 0, []
        for piece in pieces:
            cuts.append(self._cut(at, at + len(piece)))
            at += len(piece) + gap
        return cuts

    def __str__(self) -> str:
        return self

    def __format__(self, spec: str) -> str:
        return super().__format__(spec) if spec else self

    def __add__(self, other: str) -> str:
        return joined((self, other)) if type(other) in (str, TemplateText) else NotImplemented

    def __radd__(self, other: str) -> str:
        return joined((other, self)) if type(other) in (str, TemplateText) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> str:
        return _masked(super().__mul__(count), self._own * count)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        return _formatted(self, values)

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        text = super().__getitem__(key)
        own = self._own[key]
        return _masked(text, bytes((own,)) if isinstance(own, int) else own)

    def __iter__(self) -> Iterator[str]:
        return (self._cut(at, at + 1) for at in range(len(self)))

    def join(self, items: Iterable[str]) -> str:
        items = list(items)
        return _masked(super().join(items), self._own.join(map(own_mask, items)))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        text = super().replace(old, new, count)
        if not old:
            return text
        own, at = [], 0
        for piece in super().split(old, count):
            own.append(self._own[at : at + len(piece)])
            at += len(piece) + len(old)
        return _masked(text, own_mask(new).join(own))

    # Cutting.

    def lstrip(self, characters: str | None = None) -> str:
        return self._cut(len(self) - len(super().lstrip(characters)), len(self))

    def rstrip(self, characters: str | None = None) -> str:
        return self._cut(0, len(super().rstrip(characters)))

    def strip(self, characters: str | None = None) -> str:
        begin = len(self) - len(super().lstrip(characters))
        return self._cut(begin, max(begin, len(super().rstrip(characters))))

    def removeprefix(self, prefix: str, /) -> str:
        return self._cut(len(self) - len(super().removeprefix(prefix)), len(self))

    def removesuffix(self, suffix: str, /) -> str:
        return self._cut(0, len(super().removesuffix(suffix)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._split(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._split(super().rsplit(sep, maxsplit), sep)

    def _split(self, pieces: list[str], sep: str | None) -> list[str]:
        if sep is not None:
            return self._cuts(pieces, len(sep))
        at, cuts = 0, []
        for piece in pieces:  # between two pieces there is nothing but white space
            at = str.index(self, piece, at)
            cuts.append(self._cut(at, at + len(piece)))
            at += len(piece)
        return cuts

    def splitlines(self, keepends: bool = False) -> list[str]:
        whole = self._cuts(super().splitlines(keepends=True), 0)
        lines = super().splitlines(keepends=keepends)
        return [line[: len(bare)] for line, bare in zip(whole, lines, strict=True)]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        first, middle, last = self._cuts(super().partition(sep), 0)
        return first, middle, last

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        first, middle, last = self._cuts(super().rpartition(sep), 0)
        return first, middle, last

    # Case. Where the length is the same, each character has become one.

    def _recased(self, text: str) -> str:
        return _masked(text, self._own) if len(text) == len(self) else text

    def lower(self) -> str:
        return self._recased(super().lower())

    def upper(self) -> str:
        return self._recased(super().upper())

    def capitalize(self) -> str:
        return self._recased(super().capitalize())

    def title(self) -> str:
        return self._recased(super().title())

    def swapcase(self) -> str:
        return self._recased(super().swapcase())

    def casefold(self) -> str:
        return self._recased(super().casefold())


def _formatted(text: TemplateText, values: Any) -> str:
    """``text % values``."""
    result = str.__mod__(text, values)
    following = iter(values if isinstance(values, tuple) else (values,))
    pieces: list[str] = []
    at = 0
    for match in _CONVERSION.finditer(text):
        pieces.append(text._cut(at, match.start()))
        at = match.end()
        if match[0] == "%%":
            pieces.append(text._cut(at - 1, at))
            continue
        key = match["key"]
        one = next(following, _MISSING) if key is None else values[key]
        if one is _MISSING:
            return result
        if isinstance(one, str) and match[0] in ("%s", f"%({key})s"):
            pieces.append(one)
        else:
            pieces.append(str.__mod__(match[0], (one,) if key is None else {key: one}))
    return _if_equal(joined((*pieces, text._cut(at, len(text)))), result)


def _if_equal(traced: str, result: str) -> str:
    """The traced text, if it is the right one; else one that counts as a user's."""
    return traced if traced == result else result


class TracingFormatter(SandboxedFormatter):
    """``str.format`` in the sandbox."""

    def __init__(self, environment: SandboxedEnvironment) -> None:
        super().__init__(environment)
        self._fields: list[str] = []

    def format_field(self, value: Any, format_spec: str) -> Any:
        bound_format(format_spec)  # which may hold what was given as an argument
        text = super().format_field(value, format_spec)
        self._fields.append(text)
        return text

    def trace(self, text: TemplateText, values: Sequence[Any], named: dict[str, Any]) -> str:
        """``text.format(*values, **named)``."""
        self._fields.clear()
        result = plain(self.vformat(text, values, named))
        fields = iter(self._fields)
        mark = written if b"\0" not in text._own else plain
        pieces: list[str] = []
        for literal, name, spec, _ in Formatter().parse(text):
            pieces.append(mark(literal))
            if name is not None:
                for _, nested, _, _ in Formatter().parse(spec or ""):
                    if nested is not None:
                        next(fields)
                pieces.append(next(fields))
        return _if_equal(joined(pieces), result)
