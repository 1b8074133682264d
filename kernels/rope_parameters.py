"""What a checkpoint says about rotary embedding, as data: read without torch."""

from __future__ import annotations

import msgspec

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


class RopeParameters(msgspec.Struct, frozen=True):
    """What a checkpoint's config says about rotary embedding."""

    theta: float
    rope_type: str = "default"
    """One of ``ROPE_TYPES``."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    """The trained length."""
    attention_factor: float = 1.0
    """What cos and sin are multiplied by."""
    beta_fast: float = 32.0
    """``yarn``: pairs with so many turns within the trained length, or more, keep their frequency;
    …"""
    beta_slow: float = 1.0
    """… those with fewer than this have it divided by ``factor``."""
    truncate: bool = True
    """``yarn``: whether both bounds are rounded to whole pairs."""
    short_factors: tuple[float, ...] = ()
    """``longrope``: what each frequency is divided by, within the trained length …"""
    long_factors: tuple[float, ...] = ()
    """… and for longer sequences."""

    def for_length(self, longest: int) -> RopeParameters:
        """With one set of factors, for sequences of up to so many positions."""
        beyond = longest > self.original_max_position_embeddings
        factors = self.long_factors if beyond else self.short_factors
        return msgspec.structs.replace(self, short_factors=factors, long_factors=())
