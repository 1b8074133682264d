"""To which lengths the vectors of a model may be cut, as its folder or its model card says.

Whoever trains a model for that (Matryoshka representation learning, arXiv:2205.13147) says it in
``config.json`` by ``matryoshka_dimensions`` or ``is_matryoshka``. The published folders of
Qwen3-Embedding and EmbeddingGemma have neither, so these two are known as their authors call them.
"""

from __future__ import annotations

import re

import msgspec

from penstock.protocol.model_info import ModelInfo

_QWEN3 = re.compile(r"qwen3[-_.]?embedding", re.IGNORECASE)
_QWEN3_LEAST = 32
"""Its model card: "supports user-defined output dimensions ranging from 32 to" all."""
_GEMMA = re.compile(r"embedding[-_.]?gemma", re.IGNORECASE)
_GEMMA_LENGTHS = [128, 256, 512, 768]
"""Its model card: "768, with smaller options available (512, 256, or 128)"."""


class VectorLengths(msgspec.Struct, frozen=True):
    """Beside the length that vectors have uncut."""

    listed: list[int] = []
    least: int | None = None
    """Any length from here on; ``None``: those that are listed alone."""

    def __contains__(self, length: int) -> bool:
        return length in self.listed or (self.least is not None and length >= self.least)

    def __str__(self) -> str:
        """Empty: none."""
        if self.least is not None:
            return f"{self.least} or more"
        return ", ".join(map(str, self.listed))


def vector_lengths(info: ModelInfo) -> VectorLengths:
    listed = info.config.get("matryoshka_dimensions")
    if isinstance(listed, list) and listed:
        return VectorLengths(sorted(one for one in listed if type(one) is int and one > 0))
    if info.config.get("is_matryoshka") is True:
        return VectorLengths(least=1)
    if info.architecture in ("Qwen3ForCausalLM", "Qwen3Model") and info.is_named(_QWEN3):
        return VectorLengths(least=_QWEN3_LEAST)
    if info.architecture == "Gemma3TextModel" and info.is_named(_GEMMA):
        return VectorLengths(_GEMMA_LENGTHS)
    return VectorLengths()
