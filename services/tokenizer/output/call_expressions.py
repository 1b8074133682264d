"""The regular expressions of ``CallScanner``."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from penstock.services.tokenizer.output.pattern import up_to

_ENDS = r",:)\]}"
"""Behind a quote that ends a string. So are marks."""
_HEX = "[0-9a-fA-F]"
_ESCAPE = (
    rf"\\u[dD][89abAB]{_HEX}{{2}}(?:\\u[dD][c-fC-F]{_HEX}{{2}}|(?!\\?u?{_HEX}{{0,3}}\Z))"
    rf"|\\u(?![dD][89abAB]){_HEX}{{4}}|\\x{_HEX}{{2}}|\\U{_HEX}{{8}}"
    rf"|\\(?:[^uUx\ud800-\udfff]|[uUx](?!{_HEX}{{0,7}}\Z)(?!{_HEX}{{4}}\\?u?{_HEX}{{0,3}}\Z))"
)
"""An escape that more text cannot change."""


class Regexes(NamedTuple):
    key: re.Pattern[str]
    word: re.Pattern[str]


@lru_cache(maxsize=64)
def regexes(stops: str) -> Regexes:
    key = re.compile(rf"[^\s=:,()\[\]{{}}\"'\\\x00-\x1f\ud800-\udfff{stops}]*+")
    return Regexes(key, re.compile(rf"[^,()\[\]{{}}\"'\ud800-\udfff{stops}]*+"))


@lru_cache(maxsize=64)
def all_before(start: str, fits: str, idle: str) -> Callable[[str, int], re.Match[str] | None]:
    """Matches all before the next place where ``fits`` does; see ``up_to``."""
    return re.compile(up_to(start, fits, idle)).match


@lru_cache(maxsize=8)
def inside(quote: str) -> re.Pattern[str]:
    """The inside of a string, up to what ends it or may come to."""
    within = rf"{quote}(?=[ \t\r\n]{{0,64}}+[^ \t\r\n{_ENDS}\ud800-\udfff])"
    return re.compile(rf"(?:[^\\{quote}\ud800-\udfff]++|{_ESCAPE}|{within})*+")


@lru_cache(maxsize=8)
def ending(quote: str) -> re.Pattern[str]:
    """A quote that ends a string."""
    return re.compile(rf"{quote}(?=[ \t\r\n]{{0,64}}+[{_ENDS}\ud800-\udfff]|[ \t\r\n]{{64}})")
