"""What a step takes that is computed with torch's operations, by sizes alone: an estimate.

On a GPU a worker measures it; ``penstock plan`` and workers on the CPU count with this.
"""

from __future__ import annotations

from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.memory_account import MemoryPart
from penstock.services.worker.model_shape import ModelShape

_FP32 = 4
GATHERED_ELEMENTS = {"cpu": 1024 * 1024, "cuda": 32 * 1024 * 1024}
"""Bounds the keys that are gathered for one product, as in ``penstock.kernels.attention`` and
``sdpa_attention``, unless one context alone has more."""
_DRAW_BYTES = 32
"""For each logit of a row that is drawn under limits: sorted logits and their places, and what the
limits are found by."""
_PROMPT_ROWS = 64
"""As in ``model_executor``."""


def plain_parts(
    shape: ModelShape, sizes: EngineSizes, item_bytes: int, device: str
) -> list[MemoryPart]:
    """device: ``cpu`` or ``cuda``."""
    rows = max(sizes.max_num_batched_tokens, sizes.max_num_seqs)
    drawn = max(sizes.max_num_seqs, _PROMPT_ROWS)
    logits = drawn * shape.vocab * (item_bytes + _DRAW_BYTES)
    return [
        MemoryPart("step", activations(shape, rows, item_bytes), f"activations of {rows:,} rows"),
        MemoryPart("sampler", logits + sampler_tables(shape.vocab, sizes.max_num_seqs),
                   f"logits of {drawn:,} rows"),
        *later_plain_parts(shape, sizes, sizes.max_model_len, item_bytes, device),
    ]  # fmt: skip


def activations(shape: ModelShape, rows: int, item_bytes: int) -> int:
    """Bytes that a layer takes for so many rows."""
    attention = shape.heads_width * (item_bytes + 3 * _FP32)
    mlp = shape.mlp_width * (item_bytes + _FP32)
    return rows * (3 * shape.hidden * _FP32 + max(attention, mlp))


def later_plain_parts(
    shape: ModelShape, sizes: EngineSizes, positions: int, item_bytes: int, device: str
) -> list[MemoryPart]:
    """What the profile of a step does not show: longer contexts, and grammars.

    positions: of which the profile has not made the rotary embedding.
    """
    keys = GATHERED_ELEMENTS[device]
    if device == "cuda":
        keys = max(keys, sizes.max_model_len * shape.kv_width)
    masks = 2 * sizes.max_num_seqs * -(-shape.vocab // 32) * _FP32
    return [
        MemoryPart("step", 4 * keys * item_bytes),
        rotary_tables(shape, positions),
        MemoryPart("grammars", masks, "masks"),
    ]


def rotary_tables(shape: ModelShape, positions: int) -> MemoryPart:
    """Cosines and sines of so many positions, as torch's operations read them."""
    return MemoryPart("step", positions * shape.rotary_width * _FP32)


def sampler_tables(vocab: int, slots: int) -> int:
    """Counts and masks of ``SlotAdjuster``, once a slot needs them."""
    return slots * (2 * vocab + -(-vocab // 32) * _FP32)
