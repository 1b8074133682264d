"""Whole numbers as people write them: ``32k``."""

from __future__ import annotations

import re

import msgspec

DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
"""As vLLM reads them: ``32k`` is 32,000 and ``32K`` is 32,768."""
FORMS = "in digits alone, or with a suffix: 32k is 32,000, and 32K is 32,768"
_SPELLED = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,18}))?([kmgtKMGT])")


def spelled_number(text: str) -> int | str:
    """The number that ``text`` spells with a suffix; ``text`` itself where it has none.

    Raises ``msgspec.ValidationError`` for one that is not whole.
    """
    found = _SPELLED.fullmatch(text)
    if found is None:
        return text
    whole, fraction, suffix = found[1], found[2] or "", found[3]
    unit: int = {**DECIMAL, **BINARY}[suffix]
    parts: int = 10 ** len(fraction)
    number, rest = divmod(int(whole + fraction) * unit, parts)
    if rest:
        raise msgspec.ValidationError("Expected a whole number, and this is a fraction")
    return number
