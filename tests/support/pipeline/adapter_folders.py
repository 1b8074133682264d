"""PEFT folders with random adapters, written without peft."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

PREFIX = "base_model.model."
ROWS = "prompt_embeddings"


def write_soft_prompt(
    folder: Path,
    count: int,
    hidden: int,
    *,
    seed: int = 0,
    config: dict[str, Any] | None = None,
    tensors: dict[str, Tensor] | None = None,
) -> Path:
    """As peft saves it. ``tensors``: further ones, or others of these names."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, hidden, generator=generator) * 0.2
    save_file({ROWS: rows} | (tensors or {}), folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": count,
        "token_dim": hidden, "num_transformer_submodules": 1, "prompt_tuning_init": "RANDOM",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings | (config or {})))
    return folder


def write_adapter(
    folder: Path,
    modules: dict[str, tuple[int, int]],
    *,
    seed: int = 0,
    ranks: Callable[[str], int] = lambda name: 4,
    config: dict[str, Any] | None = None,
    tensors: dict[str, Tensor] | None = None,
    without: Collection[str] = (),
) -> Path:
    """``tensors``: further ones, or others of these names; ``without``: names that are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for name, (outputs, inputs) in modules.items():
        rank = ranks(name)
        for which, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            drawn = torch.randn(shape, generator=generator) * 0.2
            found[f"{PREFIX}{name}.lora_{which}.weight"] = drawn
    found |= tensors or {}
    for name in without:
        del found[name]
    save_file(found, folder / "adapter_model.safetensors")
    kinds = sorted({name.rpartition(".")[2] for name in modules})
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": kinds}
    (folder / "adapter_config.json").write_text(json.dumps(settings | (config or {})))
    return folder
