"""The tensors of a PEFT folder, checked against a model before memory is taken for them.

Only ``adapter_model.safetensors`` is read: nothing in a folder is ever executed.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.protocol.config.machine import free_host_bytes
from penstock.protocol.model_info import BadModelFolder
from penstock.services.worker.adapters.peft_config import CONFIG, PeftConfig, read_peft_config
from penstock.services.worker.memory_account import shown_bytes
from penstock.services.worker.safetensors_file import (
    WEIGHT_TYPES,
    SafetensorsFile,
    TensorEntry,
    listed,
    shown,
)
from penstock.services.worker.weight_reading import DTYPES

WEIGHTS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_PREFIX = "base_model.model."
_PAIR = re.compile(r"(.+)\.lora_([AB])\.weight")
_DIGEST_BYTES = 16
_REFUSED = {
    ".lora_magnitude_vector": "DoRA",
    ".lora_embedding_": "an adapter of the embedding",
    ".modules_to_save.": "a whole module",
    ".bias": "a bias",
}
"""Parts of tensors' names, and what they belong to."""


class LayerSize(NamedTuple):
    """Of a linear layer that an adapter may have a part for."""

    outputs: int
    inputs: int


class LowRankPair(NamedTuple):
    """What an adapter adds to one linear layer: scale * up(down(x))."""

    down: Tensor
    """A: [rank, inputs], as stored."""
    up: Tensor
    """B: [outputs, rank], as stored."""
    scale: float


class ReadAdapter(NamedTuple):
    digest: str
    """Of all that the result depends on, in hex."""
    pairs: dict[str, LowRankPair]
    """By the name of the linear layer in the checkpoint."""
    virtual: Tensor | None = None
    """[n, hidden], as stored: the rows of a soft prompt."""

    @property
    def virtual_tokens(self) -> int:
        return 0 if self.virtual is None else len(self.virtual)


def check_files(folder: Path) -> None:
    """Raises ``BadModelFolder`` where a folder has no adapter, or one that is never opened."""
    if not folder.is_dir():
        raise BadModelFolder(f"{folder}: no such folder")
    if not (folder / WEIGHTS).exists() and (folder / _PICKLE).exists():
        raise BadModelFolder(
            f"{folder}: {_PICKLE} is a pickle, which can run code and is not read; save the "
            f"adapter as {WEIGHTS} (save_pretrained with safe_serialization)"
        )
    for name in (WEIGHTS, CONFIG):
        if (folder / name).is_symlink():
            raise BadModelFolder(f"{folder}: {name} is a link; links are not followed")


class PeftFolder(ABC):
    """The configuration and the file's header of one adapter, checked."""

    def __init__(self, folder: Path) -> None:
        """Raises ``BadModelFolder``."""
        self.folder = folder
        self._file = SafetensorsFile(folder / WEIGHTS)

    @property
    def num_bytes(self) -> int:
        """Of all tensors, as stored."""
        return sum(entry.end - entry.begin for entry in self._file.entries.values())

    def read(self, item_bytes: int = 4) -> ReadAdapter:
        """All tensors, and the digest of what was read. item_bytes: of the type in which a copy of
        them is made for the model. Raises ``BadModelFolder``, also for numbers that are not finite,
        and before anything is read where memory lacks."""
        self._check_room(item_bytes)
        path = self._file.path
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as file:
                return self._read(file.fileno())
        except OSError as error:
            raise BadModelFolder(f"{path}: {error.strerror or error}") from None

    @abstractmethod
    def _read(self, file: int) -> ReadAdapter:
        """file: the open descriptor of the tensors' file."""

    def _check_room(self, item_bytes: int) -> None:
        shapes = [entry.shape for entry in self._file.entries.values()]
        needed, free = self.num_bytes + item_bytes * sum(map(math.prod, shapes)), free_host_bytes()
        if needed > free:
            raise BadModelFolder(
                f"{self.folder}: to read it takes {shown_bytes(needed)}, and {shown_bytes(free)} "
                "of memory are free; unload another adapter, or lower --kv-cache-memory-bytes"
            )

    def _tensor(self, file: int, name: str) -> Tensor:
        """One of the tensors, once it is known to be finite."""
        entry = self._file.entries[name]
        tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        into = _bytes(tensor)
        done = 0
        while done < len(into):
            count = os.preadv(file, [into[done:]], entry.begin + done)
            if not count:
                raise BadModelFolder(f"{self._file.path}: it became shorter while it was read")
            done += count
        if not math.isfinite(largest(tensor)):
            raise BadModelFolder(
                f"{self._file.path}: tensor {shown(name)} holds numbers that are not finite"
            )
        return tensor


class AdapterFolder(PeftFolder):
    """Of low-rank matrices."""

    def __init__(self, folder: Path, layers: Mapping[str, LayerSize], max_rank: int) -> None:
        """layers: those of the model, by their names in the checkpoint; max_rank:
        ``--max-lora-rank``. Raises ``BadModelFolder`` that lists all that does not fit."""
        check_files(folder)
        self.config: PeftConfig = read_peft_config(folder)
        super().__init__(folder)
        self._names = self._pairs(layers, max_rank)

    def _pairs(self, layers: Mapping[str, LayerSize], max_rank: int) -> dict[str, dict[str, str]]:
        """Module → ``A`` and ``B`` → name of the tensor."""
        found: dict[str, dict[str, str]] = {}
        wrong: list[str] = []
        for name, entry in self._file.entries.items():
            match = _PAIR.fullmatch(name.removeprefix(_PREFIX))
            if match is None:
                kind = next((what for part, what in _REFUSED.items() if part in name), "")
                reason = f"{kind} is not supported" if kind else "no A or B of a linear layer"
                wrong.append(f"{shown(name)}: {reason}")
                continue
            module, which = match[1], match[2]
            pair = found.setdefault(module, {})
            if which in pair:
                wrong.append(f"{shown(name)}: {shown(pair[which])} is the same matrix")
                continue
            pair[which] = name
            if reason := self._misfit(module, which, entry, layers):
                wrong.append(f"{shown(name)}: {reason}")
        for module, pair in found.items():
            if len(pair) == 1:
                wrong.append(f"{shown(module)}: A or B is missing")
        if wrong:
            raise BadModelFolder(f"{self._file.path}: {listed(wrong)}")
        if not found:
            raise BadModelFolder(f"{self._file.path}: no tensors")
        rank = max(map(self.config.rank_of, found))
        if rank > max_rank:
            raise BadModelFolder(
                f"{self.folder}: its rank is {rank}; --max-lora-rank allows {max_rank} at most"
            )
        return dict(sorted(found.items()))

    def _misfit(
        self, module: str, which: str, entry: TensorEntry, layers: Mapping[str, LayerSize]
    ) -> str:
        """Why a tensor does not fit the model; empty: it does."""
        size = layers.get(module)
        if size is None:
            return "the model has no such linear layer that an adapter may change"
        rank = self.config.rank_of(module)
        wanted = (rank, size.inputs) if which == "A" else (size.outputs, rank)
        if entry.shape != wanted:
            return f"{list(entry.shape)} instead of {list(wanted)}"
        if entry.dtype not in WEIGHT_TYPES:
            return f"type {shown(entry.dtype)} instead of {', '.join(WEIGHT_TYPES)}"
        return ""

    def _read(self, file: int) -> ReadAdapter:
        hasher = new_digest()
        pairs = {}
        for module, names in self._names.items():
            down, up = (self._tensor(file, names[which]) for which in "AB")
            scale = self.config.scale_of(module)
            pairs[module] = LowRankPair(down, up, scale)
            for part in (down, up):
                add_tensor(hasher, f"{module} {list(part.shape)} {part.dtype} {scale!r}", part)
        return ReadAdapter(hasher.hexdigest(), pairs)


def new_digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)


def add_tensor(hasher: hashlib.blake2b, about: str, tensor: Tensor) -> None:
    """about: what a result depends on beside the numbers."""
    hasher.update(about.encode())
    hasher.update(_bytes(tensor))


def largest(tensor: Tensor) -> float:
    """Of the absolute values; NaN where there is one. In one pass: looking at each number whether
    it is finite takes twenty times as long."""
    low, high = tensor.aminmax()
    return float(torch.maximum(-low, high))


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    flat: npt.NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return flat.data
