"""What msgspec says of a wrong value, in words for people who know no types of Python."""

from __future__ import annotations

import re

import msgspec

_WORDS = {
    "array": "an array",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "object": "an object",
    "str": "a string",
}
_TYPE = f"(?:{'|'.join(_WORDS)}|null)"
_TYPES = re.compile(rf"`({_TYPE}(?: \| {_TYPE})*)`")
_GOT = re.compile(r", got `[a-z]+`$")


def plain_error(error: msgspec.ValidationError | OverflowError) -> str:
    """``Expected a whole number`` for ``Expected `int | null`, got `str```.

    What was given instead is left to who shows the value, except for a part of it, whose place is
    then named.
    """
    return _TYPES.sub(_in_words, _GOT.sub("", str(error)))


def _in_words(found: re.Match[str]) -> str:
    kinds = [kind for kind in found[1].split(" | ") if kind != "null"] or ["null"]
    return " or ".join(_WORDS.get(kind, kind) for kind in kinds)
