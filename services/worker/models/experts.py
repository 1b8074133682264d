"""Mixtures of experts: how ``config.json`` tells of them, and the words that refuse them."""

from __future__ import annotations

from penstock.protocol.model_info import ModelInfo

_KEYS = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts",
)  # fmt: skip


def num_experts(info: ModelInfo) -> int:
    """Experts of a layer, by the usual names; 0: its layers are dense, as far as these tell."""
    values = (info.config.get(key) for key in _KEYS)
    return next((value for value in values if type(value) is int and value > 1), 0)


def words_of_experts(architecture: str, count: int) -> str:
    """count: of a layer."""
    return f"{architecture} has {count} experts a layer, and Penstock's own layers are dense"
