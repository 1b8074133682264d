"""Token ids in large bodies: measured before they are decoded, and decoded slice by slice.

A decoder holds Python's lock for as long as a call takes, also in a thread: 80 ms for 8 MB of ids,
in which no stream gets a token. So long arrays are cut out of a body, the rest is decoded, and of
an array only its commas are counted until its length is known to be allowed.
"""

from __future__ import annotations

import re
import secrets
from array import array
from functools import cache
from typing import Any, TypeVar

import msgspec

from penstock.protocol.declared import Declared
from penstock.protocol.shown_values import show
from penstock.services.frontend.body import SLICE_BYTES, Pause, decode_body
from penstock.services.frontend.errors import bad_request

MIN_CUT_BYTES = 4096
"""Shorter arrays stay where they are."""
MAX_CUTS = 128
_SPACE = re.compile(rb"[ \t\r\n]{0,64}")
_NUMBER_BEGINS = frozenset(b"-0123456789")
_BACKSLASH = ord("\\")
_decode = msgspec.json.Decoder(list[int]).decode
Body = TypeVar("Body", bound=Declared)


class IdArray:
    """The text of a JSON array of token ids, between its brackets. It is not empty."""

    def __init__(self, body: bytes, begin: int, end: int, pause: Pause) -> None:
        self._body = body
        self._begin = begin
        self._end = end
        self._pause = pause

    def is_longer_than(self, limit: int) -> bool:
        """Whether it has more than ``limit`` ids. Counts no further than it must."""
        commas, begin = 0, self._begin
        while begin < self._end and commas < limit:
            self._pause()
            commas += self._body.count(b",", begin, min(begin + SLICE_BYTES, self._end))
            begin += SLICE_BYTES
        return commas >= limit

    def _slice_end(self, begin: int) -> int:
        """Where a slice ends: at a comma, or with the array."""
        if self._end - begin <= SLICE_BYTES:
            return self._end
        end = self._body.rfind(b",", begin, begin + SLICE_BYTES)
        if end < 0:  # blanks, mostly
            end = self._body.find(b",", begin + SLICE_BYTES, self._end)
        return end if end >= 0 else self._end

    def decode(self, where: str, vocab_size: int, param: str) -> array[int]:
        """The ids as int32. Raises ``ApiError`` 400 that names the first that is none, and the
        field ``param``."""
        ids = array("i")
        begin = self._begin
        while begin <= self._end:
            self._pause()
            end = self._slice_end(begin)
            try:
                found = _decode(b"[%b]" % self._body[begin:end])
            except (msgspec.MsgspecError, UnicodeDecodeError):
                found = []
            if not found:  # as for two commas, or one at the end
                raise bad_request(
                    f"{where} holds something else than a token id, or nothing, between two commas "
                    f"behind the first {len(ids)} ids; whole numbers are allowed",
                    param=param,
                )
            check_vocabulary(found, where, vocab_size, len(ids), param)
            ids.extend(found)
            begin = end + 1
        return ids


def check_vocabulary(
    ids: list[int], where: str, vocab_size: int, before: int = 0, param: str = "prompt"
) -> None:
    """Raise ``ApiError`` 400 for an id that the model does not have. before: how many ids of the
    prompt come ahead of these."""
    for worst in (min(ids), max(ids)):
        if not 0 <= worst < vocab_size:
            raise bad_request(
                f"{where}: the token id {show(worst)} at position {before + ids.index(worst)} is "
                f"not in the vocabulary; at least 0 and below {vocab_size} is allowed",
                param=param,
            )


def decode_with_ids(
    body: bytes, declared: type[Body], pause: Pause | None, field: str = "prompt"
) -> Body:
    """A body as ``decode_body`` gives it. In a large one, which has a ``pause``, long arrays of
    token ids in ``field`` are ``IdArray``. Raises ``ApiError`` 400.

    field: holds text, token ids, or an array of either.
    """
    if pause is None:
        return decode_body(body, declared)
    spans = _long_arrays(body, b'"%b"' % field.encode())
    if not spans:
        return decode_body(body, declared, pause)
    names = [secrets.token_hex(16) for _ in spans]  # what no client can have written
    pieces: list[bytes] = []
    done = 0
    for name, (begin, end) in zip(names, spans, strict=True):
        pieces += (body[done:begin], b'"%b"' % name.encode())
        done = end
    decoded = decode_body(b"".join((*pieces, body[done:])), declared, pause)
    arrays = {
        name: IdArray(body, begin + 1, end - 1, pause)
        for name, (begin, end) in zip(names, spans, strict=True)
    }
    given: Any = getattr(decoded, field)
    found = given if isinstance(given, list) else [given]
    placed: Any = [arrays.pop(one, one) if isinstance(one, str) else one for one in found]
    if arrays:  # they stood elsewhere, and the key only looked like the one that counts
        return decode_body(body, declared, pause)
    setattr(decoded, field, placed if isinstance(given, list) else placed[0])
    return decoded


@cache
def _opening(key: bytes) -> re.Pattern[bytes]:
    return re.compile(re.escape(key) + rb"[ \t\r\n]{0,64}:[ \t\r\n]{0,64}\[")


def _long_arrays(body: bytes, key: bytes) -> list[tuple[int, int]]:
    """Where long arrays of numbers begin and end in what looks like the value of ``key``.

    The first occurrence of the key counts; whoever uses this must see that it was the right one.
    """
    place = body.find(key)
    match = _opening(key).match(body, place) if place >= 0 else None
    if match is None:
        return []
    at = _after_space(body, match.end())
    if body[at : at + 1] and body[at] in _NUMBER_BEGINS:
        span = _array(body, match.end() - 1)
        return [span] if span is not None and span[1] - span[0] >= MIN_CUT_BYTES else []
    found: list[tuple[int, int]] = []
    while len(found) < MAX_CUTS:
        first = body[at : at + 1]
        if first == b"[":
            span = _array(body, at)
            if span is None:
                break
            if span[1] - span[0] >= MIN_CUT_BYTES:
                found.append(span)
            at = span[1]
        elif first == b'"':
            at = _after_string(body, at)
        else:
            break
        at = _after_space(body, at)
        if body[at : at + 1] != b",":
            break
        at = _after_space(body, at + 1)
    return found


def _after_space(body: bytes, at: int) -> int:
    match = _SPACE.match(body, at)
    return at if match is None else match.end()


def _array(body: bytes, begin: int) -> tuple[int, int] | None:
    """The span of the array that opens at ``begin``, if nothing in it is another or a string."""
    end = body.find(b"]", begin) + 1
    if not end or any(body.find(mark, begin + 1, end) >= 0 for mark in (b"[", b'"', b"{")):
        return None
    return begin, end


def _after_string(body: bytes, begin: int) -> int:
    """The place behind the string that opens at ``begin``; the body's end if it does not close."""
    at = begin
    while (at := body.find(b'"', at + 1)) >= 0:
        before = at
        while body[before - 1] == _BACKSLASH:
            before -= 1
        if (at - before) % 2 == 0:
            return at + 1
    return len(body)
