"""What KV blocks depend on beside their tokens: who differs in any of it shares none.

A checkpoint's weights are told apart without reading all of them, which would take longer than to
load them: by names, sizes and times of change of their files, and pieces of their content. Two
fine-tunes of a model have files of one size, but differ in nearly every piece.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

import msgspec

import penstock
from penstock.protocol.config import Config
from penstock.protocol.kv_slots import SPACE_BYTES

_VERSION = 2
_WEIGHTS = (".safetensors", ".gguf", ".bin")
_PIECES = 16
_PIECE_BYTES = 4096
_ELSEWHERE = frozenset({"model", "models", "served_model_name"})
"""Settings of the model that only say where it is and what it is called."""


def kv_space(config: Config, layout: str) -> bytes:
    """layout: of a block's bytes, see ``BlockAccess``."""
    settings = msgspec.to_builtins(config.model)
    told = {name: value for name, value in settings.items() if name not in _ELSEWHERE}
    facts = [
        _VERSION,
        penstock.__version__,
        layout,
        sorted(told.items()),
        config.device.device,
        config.loading.load_format,
        _weights(Path(config.model.model)),
    ]
    if config.device.deterministic:  # whose bits are those of other kernels
        facts.append("deterministic")
    return blake2b(msgspec.json.encode(facts), digest_size=SPACE_BYTES).digest()


def _weights(model: Path) -> list[list[object]]:
    """One entry for each file that says what the model computes."""
    folder = model if model.is_dir() else model.parent
    entries: list[list[object]] = []
    for path in sorted(folder.iterdir()):
        if path.suffix in _WEIGHTS:
            status = path.stat()
            entries.append([path.name, status.st_size, status.st_mtime_ns, _pieces(path)])
        elif path.name == "config.json":
            content = blake2b(path.read_bytes(), digest_size=SPACE_BYTES)
            entries.append([path.name, content.hexdigest()])
    return entries


def _pieces(path: Path) -> str:
    """A digest of the file's beginning, end, and some of what lies between."""
    digest = blake2b(digest_size=SPACE_BYTES)
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        last = max(0, size - _PIECE_BYTES)
        for number in range(_PIECES):
            file.seek(last * number // (_PIECES - 1))
            digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()
