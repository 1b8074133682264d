"""What a folder holds of an adapter, checked against the model that it is for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from penstock.protocol.model_info import BadModelFolder
from penstock.services.worker.adapters.peft_config import CONFIG, SOFT_PROMPT, read_settings
from penstock.services.worker.adapters.peft_folder import (
    AdapterFolder,
    LayerSize,
    PeftFolder,
    check_files,
)
from penstock.services.worker.adapters.soft_prompt import MAX_VIRTUAL_TOKENS, SoftPromptFolder

NOT_ON_GPUS = "on GPUs there are no soft prompts; use --device cpu"


class AdaptableModel(NamedTuple):
    """A whole model, as far as adapters must fit it."""

    layers: Mapping[str, LayerSize]
    """Its linear layers, by their names in PEFT folders."""
    hidden_size: int
    most_virtual_tokens: int = MAX_VIRTUAL_TOKENS
    """Ahead of a prompt, so that there is room for it."""
    no_soft_prompts: str = ""
    """Why it takes none; empty: it does."""


def room_for_virtual_tokens(max_model_len: int) -> int:
    """What a prompt of one token, and one of output, leave."""
    return max(0, max_model_len - 2)


def checked_folder(folder: Path, model: AdaptableModel, max_rank: int) -> PeftFolder:
    """max_rank: ``--max-lora-rank``. Raises ``BadModelFolder`` that says what does not fit."""
    check_files(folder)
    path = folder / CONFIG
    if read_settings(path).get("peft_type") != SOFT_PROMPT:
        return AdapterFolder(folder, model.layers, max_rank)
    if model.no_soft_prompts:
        raise BadModelFolder(f"{path}: peft_type is {SOFT_PROMPT!r}: {model.no_soft_prompts}")
    return SoftPromptFolder(folder, model.hidden_size, model.most_virtual_tokens)
