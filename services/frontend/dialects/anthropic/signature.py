"""Signatures of thinking blocks: clients send them back with the block, unread.

Ours says which text it belongs to, so that a block that was cut or changed on its way is noticed.
Where the text itself is not shown, it stands in the signature, so that the model has it when the
block comes back. It is only written down in base64: who may not read it here could have asked for
it. One of another server says nothing here.
"""

from __future__ import annotations

import base64
import binascii
import hashlib

_PREFIX = "penstock-"
_BYTES = 24
_KEPT = "."
"""Before a text that is kept."""


class Signature:
    """The signature of a text that comes in pieces."""

    __slots__ = ("_hash", "_kept")

    def __init__(self, *, keeps: bool = False) -> None:
        """keeps: the block does not show the text, so the signature has it."""
        self._hash = hashlib.blake2b(digest_size=_BYTES)
        self._kept: list[bytes] | None = [] if keeps else None

    def add(self, text: str) -> None:
        encoded = text.encode(errors="surrogatepass")
        self._hash.update(encoded)
        if self._kept is not None:
            self._kept.append(encoded)

    @property
    def value(self) -> str:
        """Of all that was added."""
        signature = _PREFIX + self._hash.hexdigest()
        if not self._kept:
            return signature
        return signature + _KEPT + base64.b64encode(b"".join(self._kept)).decode()


def sign(text: str, *, keeps: bool = False) -> str:
    signature = Signature(keeps=keeps)
    signature.add(text)
    return signature.value


def signed_thought(signature: str, text: str) -> str | None:
    """What was thought, from a block that came back: its text, or the one that its signature keeps.
    ``None``: the signature is one of ours, of another text."""
    if not signature.startswith(_PREFIX):
        return text
    kept = signature.partition(_KEPT)[2]
    if not kept:
        return text if signature == sign(text) else None
    try:
        thought = base64.b64decode(kept, validate=True).decode(errors="surrogatepass")
    except (binascii.Error, ValueError):
        return None
    return thought if text in ("", thought) and signature == sign(thought, keeps=True) else None
