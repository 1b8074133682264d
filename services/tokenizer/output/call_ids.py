"""Ids of tool calls that another process makes alike, when it goes on with an answer."""

from __future__ import annotations

import hashlib

from penstock.services.tokenizer.output.family import IdStyle

_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class CallIds:
    """Makes the ids of the calls of one choice, in the style of its family."""

    __slots__ = ("_seed", "_style")

    def __init__(self, style: IdStyle, request: str, choice: int) -> None:
        """request: what names the request in every process that may go on with it."""
        self._style = style
        self._seed = f"{request}\x00{choice}"

    def __call__(self, index: int, name: str) -> str:
        """The id of a call, from its number among those of its choice and the tool's name."""
        if self._style is IdStyle.KIMI:
            return f"functions.{name}:{index}"
        digest = hashlib.sha256(f"{self._seed}\x00{index}".encode(errors="replace"))
        if self._style is IdStyle.MISTRAL:
            number = int.from_bytes(digest.digest()[:16], "little")
            return "".join(_LETTERS[number // 62**place % 62] for place in range(9))
        return f"call_{digest.hexdigest()[:24]}"
