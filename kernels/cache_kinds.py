"""How many bytes keys and values take, by what they are stored as. Needs no torch."""

from __future__ import annotations

from typing import Literal

KVCacheKind = Literal["auto", "fp8", "int8"]
"""What numbers of keys and values are stored as; ``auto``: as the model's own type."""
SCALE_BYTES = 4
"""Of the fp32 that codes of one position's head are multiplied by."""


def stored_head(dim: int, item_bytes: int, kind: KVCacheKind = "auto") -> int:
    """Bytes of one position's key or value of one head; item_bytes: of the model's own type."""
    return dim * item_bytes if kind == "auto" else dim + SCALE_BYTES
