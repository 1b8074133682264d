"""A model's tokenizer as a gateway fetches it: a zip archive in pieces, whose last one has its
SHA-256."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from penstock.protocol.grpc.engine import common_pb2

PIECE_BYTES = 64 * 1024
NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
)
PATTERNS = ("*.jinja", "*.model", "*.tiktoken")


def archive(folder: Path) -> bytes:
    """The zip of the folder's tokenizer files. Takes up to a second for large ones. Raises
    ``OSError``."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        named = [folder / name for name in NAMES]
        found = [path for pattern in PATTERNS for path in sorted(folder.glob(pattern))]
        for path in [*named, *found]:
            if path.is_file():
                packed.write(path, path.name)
    return buffer.getvalue()


def pieces(packed: bytes) -> Iterator[common_pb2.GetTokenizerChunk]:
    last = max(0, len(packed) - 1) // PIECE_BYTES * PIECE_BYTES
    for begin in range(0, last, PIECE_BYTES):
        yield common_pb2.GetTokenizerChunk(data=packed[begin : begin + PIECE_BYTES])
    digest = hashlib.sha256(packed).hexdigest()
    yield common_pb2.GetTokenizerChunk(data=packed[last:], sha256=digest)
