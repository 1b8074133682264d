"""Regular expressions of JSON Schema (ECMA-262 with the ``u`` flag) in the syntax of the compiler.

The compiler's syntax (Rust's) reads some of the same text as something else: ``[[a]b]`` and
``[a&&b]`` are sets there, ``\\A`` is an anchor, ``.`` takes a carriage return. So a pattern is read
here character by character, and written again with nothing left to interpretation.
"""

from __future__ import annotations

from string import hexdigits, punctuation

from penstock.protocol.grammar.json_schema.keywords import SchemaRefused, shown

CLASSES = {
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": r"\x{9}-\x{d} \x{a0}\x{1680}\x{2000}-\x{200a}"
    r"\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}",
}
"""ECMA-262 section 22.2.2.9."""
ANY_BUT_LINE_ENDS = r"[^\x{a}\x{d}\x{2028}\x{2029}]"
ANYTHING = r"[\x{0}-\x{10ffff}]"
CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
CATEGORIES = frozenset(
    {"L", "Lu", "Ll", "Lt", "Lm", "Lo", "M", "Mn", "Mc", "Me", "N", "Nd", "Nl", "No", "P", "S"}
)
MAX_REPEAT = 100_000
SPELLED_CONTROLS = frozenset("\b\f\n\r\t")
"""Control characters that the answer's JSON can spell; there is no ``\\uXXXX`` in it."""


def unspelled(text: str) -> str | None:
    """The first control character of ``text`` that an answer cannot hold."""
    for character in text:
        if (character < " " or character == "\x7f") and character not in SPELLED_CONTROLS:
            return character
    return None


def translate(pattern: str) -> str:
    """The same pattern for the compiler. Raises ``SchemaRefused`` for what it cannot express."""
    return _Reader(pattern).read()


class _Reader:
    """One pass over a pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def read(self) -> str:
        written: list[str] = []
        open_groups = 0
        repeatable = False
        while (character := self._take()) is not None:
            if character == "(":
                written.append(self._group())
                open_groups, repeatable = open_groups + 1, False
            elif character == ")":
                open_groups, repeatable = open_groups - 1, True
                if open_groups < 0:
                    raise self._refused("has a ) too many")
                written.append(")")
            elif character in "|^$":
                written.append(character)
                repeatable = False
            elif character in "*+?{":
                if not repeatable:
                    raise self._refused(f"repeats nothing with {character}")
                written.append(self._repeat(character))
                repeatable = False
            else:
                written.append(self._atom(character))
                repeatable = True
        if open_groups:
            raise self._refused("has a ( that is not closed")
        return "".join(written)

    def _refused(self, what: str) -> SchemaRefused:
        return SchemaRefused(f"pattern {shown(self._pattern)} {what}")

    def _take(self) -> str | None:
        if self._at >= len(self._pattern):
            return None
        self._at += 1
        return self._pattern[self._at - 1]

    def _accept(self, text: str) -> bool:
        if self._pattern.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _group(self) -> str:
        if not self._accept("?"):
            return "(?:"
        if self._accept(":"):
            return "(?:"
        if self._pattern.startswith(("<=", "<!", "=", "!"), self._at):
            raise self._refused("looks ahead or behind, which is not supported; say what may come")
        end = self._pattern.find(">", self._at)
        if self._accept("<") and self._pattern[self._at : end].isidentifier():
            self._at = end + 1
            return "(?:"
        raise self._refused("has a group (?... that is not known; use (?:...)")

    def _repeat(self, character: str) -> str:
        if character == "{":
            end = self._pattern.find("}", self._at)
            low, comma, high = self._pattern[self._at : max(end, self._at)].partition(",")
            if not _count(low) or not (high == "" or _count(high)):
                raise self._refused("has a { that is no repetition; write \\{ for the character")
            if max(int(low), int(high or 0)) > MAX_REPEAT:
                raise self._refused(f"repeats more than {MAX_REPEAT} times")
            if high and int(high) < int(low):
                raise self._refused("has a repetition whose maximum is below its minimum")
            self._at = end + 1
            character = f"{{{int(low)}{comma}{int(high) if high else ''}}}"
        self._accept("?")  # Lazy or not, the same texts match.
        return character

    def _atom(self, character: str) -> str:
        if character == ".":
            return ANY_BUT_LINE_ENDS
        if character == "[":
            return self._class()
        if character in "]}":
            raise self._refused(f"has a {character} that closes nothing; write \\{character}")
        if character == "\\":
            escaped = self._escape(in_class=False)
            return self._spelled(escaped) if isinstance(escaped, int) else escaped
        return self._spelled(ord(character))

    def _spelled(self, code: int) -> str:
        if unspelled(chr(code)):
            raise self._refused(
                f"has the control character {chr(code)!a}, which no answer can hold"
            )
        return _code(code)

    def _class(self) -> str:
        negated = self._accept("^")
        parts: list[str] = []
        while not self._accept("]"):
            low = self._class_member()
            if (
                isinstance(low, int)
                and self._pattern.startswith("-", self._at)
                and not self._pattern.startswith("-]", self._at)
            ):
                self._at += 1
                high = self._class_member()
                if not isinstance(high, int) or high < low:
                    raise self._refused("has a range in [...] that is none")
                parts.append(f"{_code(low)}-{_code(high)}")
            else:
                parts.append(_code(low) if isinstance(low, int) else low)
        if not parts:
            if negated:
                return ANYTHING
            raise self._refused("has an empty [], which matches nothing")
        return f"[{'^' if negated else ''}{''.join(parts)}]"

    def _class_member(self) -> int | str:
        character = self._take()
        if character is None:
            raise self._refused("has a [ that is not closed")
        return self._escape(in_class=True) if character == "\\" else ord(character)

    def _escape(self, *, in_class: bool) -> int | str:
        """A code point, or a class."""
        character = self._take()
        if character is None:
            raise self._refused("ends with a \\")
        if character.lower() in CLASSES:
            negation = "^" if character.isupper() else ""
            return f"[{negation}{CLASSES[character.lower()]}]"
        if character in CONTROLS:
            return CONTROLS[character]
        if character == "b" and in_class:
            return 8
        if character in "xu":
            return self._number(character)
        if character in "pP":
            return self._category(character)
        if character in punctuation:
            return ord(character)
        what = "word boundaries are" if character in "bB" else "it is"
        raise self._refused(f"has \\{character}; {what} not supported")

    def _number(self, kind: str) -> int:
        if kind == "u" and self._accept("{"):
            end = max(self._pattern.find("}", self._at), self._at)
            code = self._hexadecimal(end - self._at, at_most=6)
            self._at += 1
        else:
            code = self._hexadecimal(2 if kind == "x" else 4, at_most=4)
            if 0xD800 <= code < 0xDC00 and self._accept("\\u"):
                low = self._hexadecimal(4, at_most=4)
                if 0xDC00 <= low < 0xE000:
                    return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise self._refused("has half of a surrogate pair, or a character past U+10FFFF")
        return code

    def _hexadecimal(self, length: int, at_most: int) -> int:
        digits = self._pattern[self._at : self._at + length]
        good = len(digits) == length and all(digit in hexdigits for digit in digits)
        if not good or not 1 <= length <= at_most:
            raise self._refused("has \\x or \\u without its hexadecimal digits")
        self._at += length
        return int(digits, 16)

    def _category(self, kind: str) -> str:
        end = self._pattern.find("}", self._at)
        name = self._pattern[self._at + 1 : end] if self._accept_brace(end) else ""
        if name not in CATEGORIES:
            known = ", ".join(sorted(CATEGORIES))
            raise self._refused(f"has \\{kind} without one of these categories in {{}}: {known}")
        self._at = end + 1
        return f"\\{kind}{{{name}}}"

    def _accept_brace(self, end: int) -> bool:
        return end >= 0 and self._pattern.startswith("{", self._at)


def _count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9


def _code(code: int) -> str:
    character = chr(code)
    if character.isascii() and (character.isalnum() or character in " _"):
        return character
    return f"\\x{{{code:x}}}"
