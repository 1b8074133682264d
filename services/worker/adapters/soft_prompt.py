"""Soft prompts (prompt tuning) in PEFT folders: rows that stand ahead of a prompt's embeddings.

Lester et al., "The Power of Scale for Parameter-Efficient Prompt Tuning" (arXiv 2104.08691). The
keys are those of peft's ``PromptTuningConfig``, and ``prompt_embeddings`` is the one tensor that it
saves. Peft hands the rows to the model beside those that its embedding gave, so what a model
multiplies inside of its embedding does not multiply them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from penstock.protocol.model_info import BadModelFolder
from penstock.protocol.shown_values import show
from penstock.services.worker.adapters.peft_config import CONFIG, read_settings
from penstock.services.worker.adapters.peft_folder import (
    PeftFolder,
    ReadAdapter,
    add_tensor,
    check_files,
    new_digest,
)
from penstock.services.worker.safetensors_file import WEIGHT_TYPES, listed, shown

MAX_VIRTUAL_TOKENS = 4096
_TENSOR = "prompt_embeddings"
_HARMLESS = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "inference_mode", "num_attention_heads",
        "num_layers", "num_transformer_submodules", "num_virtual_tokens", "peft_type",
        "peft_version", "prompt_tuning_init", "prompt_tuning_init_text", "revision", "task_type",
        "token_dim", "tokenizer_kwargs", "tokenizer_name_or_path",
    }
)  # fmt: skip
"""What is read below, or says nothing of trained rows."""


class VirtualTokens(NamedTuple):
    """A soft prompt as a model computes with it."""

    rows: Tensor
    """[n, hidden], in the model's type."""

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes


class SoftPromptFolder(PeftFolder):
    def __init__(self, folder: Path, hidden_size: int, most: int) -> None:
        """hidden_size: the model's; most: rows that it has positions for. Raises
        ``BadModelFolder`` that names the file, the key and the value."""
        check_files(folder)
        self._path = folder / CONFIG
        self._count = self._checked_count(read_settings(self._path), hidden_size, most)
        super().__init__(folder)
        if wrong := self._misfits((self._count, hidden_size)):
            raise BadModelFolder(f"{self._file.path}: {listed(wrong)}")

    def _checked_count(self, raw: dict[str, Any], hidden_size: int, most: int) -> int:
        def refused(key: str, why: str) -> BadModelFolder:
            return BadModelFolder(f"{self._path}: {key} is {show(raw.get(key))}; {why}")

        if raw.get("task_type") not in (None, "CAUSAL_LM"):
            raise refused("task_type", "CAUSAL_LM alone is supported")
        if raw.get("num_transformer_submodules") not in (None, 1):
            raise refused("num_transformer_submodules", "models of one decoder (1) are supported")
        for key, value in raw.items():
            if key not in _HARMLESS and value:
                raise refused(key, "which is not supported")
        if raw.get("token_dim") not in (None, hidden_size):
            raise refused("token_dim", f"the model's hidden size is {hidden_size}")
        count, largest = raw.get("num_virtual_tokens"), min(most, MAX_VIRTUAL_TOKENS)
        if type(count) is not int or count < 1:
            raise refused("num_virtual_tokens", f"1 to {largest} are allowed")
        if count > largest:
            limit = f"{MAX_VIRTUAL_TOKENS} are allowed at most"
            if most < MAX_VIRTUAL_TOKENS:
                limit = (
                    f"behind them there must be room for a prompt and a token of output, so the "
                    f"model's {most + 2} positions (--max-model-len) allow {most} at most"
                )
            raise refused("num_virtual_tokens", limit)
        return count

    def _misfits(self, shape: tuple[int, int]) -> list[str]:
        wrong = [
            f"{shown(name)}: a soft prompt has {_TENSOR} alone"
            for name in self._file.entries
            if name != _TENSOR
        ]
        entry = self._file.entries.get(_TENSOR)
        if entry is None:
            wrong.append(f"{_TENSOR} is missing")
        elif entry.shape != shape:
            wrong.append(f"{_TENSOR}: {list(entry.shape)} instead of {list(shape)}")
        elif entry.dtype not in WEIGHT_TYPES:
            allowed = ", ".join(WEIGHT_TYPES)
            wrong.append(f"{_TENSOR}: type {shown(entry.dtype)} instead of {allowed}")
        return wrong

    def _read(self, file: int) -> ReadAdapter:
        hasher, rows = new_digest(), self._tensor(file, _TENSOR)
        add_tensor(hasher, f"{_TENSOR} {list(rows.shape)} {rows.dtype}", rows)
        return ReadAdapter(hasher.hexdigest(), {}, rows)
