"""What the bytes of finished weights depend on, as one digest."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

import msgspec
import torch

import penstock
from penstock.protocol.config import Config
from penstock.protocol.model_info import BadModelFolder

_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
"""Files that are told by size and time of change; all others by their content."""
_SMALL = 64 << 20
_ROOT = Path(__file__).resolve().parents[3]
_SOURCES = ("services/worker", "kernels")
"""Folders of the code that makes weights."""


def weights_digest(config: Config, dtype: torch.dtype) -> str:
    """Of model, settings and code; of settings also those by which memory is planned, whose account
    goes along with the weights. Reads no weights. Raises ``BadModelFolder``."""
    digest = hashlib.blake2b(digest_size=16)
    loading, device = config.loading, config.device
    said: list[object] = [config.model, config.cache, config.scheduler, config.speculation]
    said += [loading.load_format, loading.compress_weights, device.device, device.deterministic]
    said += [str(dtype), str(torch.__version__), penstock.__version__, _code()]
    digest.update(msgspec.json.encode(said, order="sorted"))
    folder = Path(config.model.model)
    try:
        for path in sorted(one for one in folder.iterdir() if one.is_file()):
            found = path.stat()  # of what a link leads to
            told: list[object] = [path.name, found.st_size]
            if path.suffix in _WEIGHTS or found.st_size > _SMALL:
                told += [found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]
            else:
                told.append(hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest())
            digest.update(msgspec.json.encode(told))
    except OSError as error:
        raise BadModelFolder(f"{folder}: {error.strerror or error}") from None
    return digest.hexdigest()


@functools.cache
def _code() -> str:
    """Of the sources that make weights: another version of them may give them another form."""
    digest = hashlib.blake2b(digest_size=16)
    for folder in _SOURCES:
        for path in sorted((_ROOT / folder).rglob("*.py")):
            with open(path, "rb", buffering=0) as file:
                content = file.read(os.fstat(file.fileno()).st_size)
            digest.update(f"{path.relative_to(_ROOT)}:{len(content)}:".encode())
            digest.update(content)
    return digest.hexdigest()
