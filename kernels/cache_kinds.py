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


WIDENED_BYTES = 256 << 20
"""Most memory for keys and values that are widened for a step's chunks: 65,536 positions of 8 KV
heads of 128. Steps that see more are computed from the codes."""


def widened_units(
    slots: int, width: int, kv_heads: int, dim: int, item_bytes: int, unit: int, block_size: int
) -> int:
    """How many units of positions there is such memory for. slots, width: of the block tables;
    item_bytes: of the model's type; unit: positions."""
    whole = slots * -(-width * block_size // unit)
    return min(whole, WIDENED_BYTES // (2 * kv_heads * unit * dim * item_bytes))
