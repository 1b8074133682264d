"""Signatures of thinking blocks: clients send them back with the block, unread.

Ours says which text it belongs to, so that a block that was cut or changed on its way is noticed.
It is no secret. One of another server says nothing here.
"""

from __future__ import annotations

import hashlib

_PREFIX = "penstock-"
_BYTES = 24


class Signature:
    """The signature of a text that comes in pieces."""

    __slots__ = ("_hash",)

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=_BYTES)

    def add(self, text: str) -> None:
        self._hash.update(text.encode(errors="surrogatepass"))

    @property
    def value(self) -> str:
        """Of all that was added."""
        return _PREFIX + self._hash.hexdigest()


def sign(text: str) -> str:
    signature = Signature()
    signature.add(text)
    return signature.value


def is_forged(signature: str, text: str) -> bool:
    """It is one of ours, of another text."""
    return signature.startswith(_PREFIX) and signature != sign(text)
