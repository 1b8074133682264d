"""What may hold back a choice's tokens, and take them back before anybody has seen them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from penstock.protocol.wire.messages.tokens import End, RowLogprobs, RowStart


class TokenExtras(msgspec.Struct, frozen=True, gc=False):
    """What a row of a ``TokenBatch`` brings beside tokens."""

    start: RowStart | None = None
    end: End | None = None
    logprobs: RowLogprobs | None = None
    pooled: bytes | None = None


NO_EXTRAS = TokenExtras()


class Passed(NamedTuple):
    """What of a row goes on to the client, with what was held back until now."""

    tokens: memoryview
    """int32."""
    more: TokenExtras
    again: bool = False
    """Tokens were taken back: the choice is to be drawn again behind those that are left."""


class Guard(Protocol):
    """Watches the tokens of one choice as they come from engines."""

    @property
    def held(self) -> int:
        """Tokens that are held back."""

    @property
    def redraws(self) -> int:
        """How often tokens had been taken back when the last of those that went on was drawn."""

    def take(self, tokens: memoryview, more: TokenExtras) -> Passed:
        """Take a row of int32 tokens, the next ones behind those that are held."""

    def replay(self, tokens: memoryview, redraws: int) -> None:
        """Go on behind int32 tokens that went on before, the last of them drawn after so many
        redraws."""

    def drawn(self) -> bytes:
        """All tokens that stand, int32."""

    def sampling(self) -> bytes:
        """How the next token is drawn: an encoded ``SlotSampling``; empty: as the request says."""


MakeGuard = Callable[[], Guard]
"""Makes the guard of a new choice."""
