"""Sizes of models by name: what ``make_model`` takes, and what kernels are timed for."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 256, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64,
        "intermediate_size": 688, "vocab_size": 4096, "max_position_embeddings": 2048,
    },
    "0.6b": {
        "hidden_size": 1024, "num_layers": 28, "num_heads": 16, "num_kv_heads": 8,
        "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
        "max_position_embeddings": 2048,
    },
    "8b": {
        "hidden_size": 4096, "num_layers": 36, "num_heads": 32, "num_kv_heads": 8,
        "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
        "max_position_embeddings": 2048, "tie": False,
    },
}  # fmt: skip
"""*tiny* has 4.2 M parameters; the others have the shapes of Qwen3-0.6B and Qwen3-8B."""
