"""A model's tokenizer as a gateway fetches it: a zip archive in pieces, whose last one has its
SHA-256."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.protocol.grpc.engine import common_pb2
from penstock.services.frontend.errors import ApiError

PIECE_BYTES = 64 * 1024
MAX_BYTES = 256 * 1024 * 1024
"""Of all files together, before they are compressed."""
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


class Archive(NamedTuple):
    """A zip archive and its SHA-256, in hex."""

    packed: bytes
    sha256: str


class TokenizerFiles:
    """The tokenizer files of one folder, packed once for everybody until one of them changes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._archive: Archive | None = None
        self._stamp: object = None
        self._lock = asyncio.Lock()

    async def archive(self) -> Archive:
        """The zip of the files. Takes up to a second for large ones, once. Raises ``ApiError`` 404
        and 413, and ``OSError``."""
        async with self._lock:
            return await asyncio.to_thread(self._current)

    def _current(self) -> Archive:
        files = self._files()
        found = [(path.name, os.stat(path)) for path in files]
        # Of before they are read: what is written from here on is a further change.
        stamp = [(name, one.st_ino, one.st_size, one.st_mtime_ns) for name, one in found]
        if self._archive is not None and stamp == self._stamp:
            return self._archive
        if not files:
            raise ApiError(404, f"There are no tokenizer files in {self._folder}")
        if (size := sum(one.st_size for _, one in found)) > MAX_BYTES:
            raise ApiError(
                413,
                f"The tokenizer files in {self._folder} have {size} bytes; {MAX_BYTES} are sent at "
                "most",
                code="tokenizer_too_large",
            )
        self._archive, self._stamp = archive_of(_packed(files)), stamp
        return self._archive

    def _files(self) -> list[Path]:
        named = [self._folder / name for name in NAMES]
        found = [path for pattern in PATTERNS for path in sorted(self._folder.glob(pattern))]
        return [path for path in (*named, *found) if path.is_file()]


def _packed(files: Sequence[Path]) -> bytes:
    buffer = io.BytesIO()
    # Files of 1970, as some images have them, are older than what a zip archive can say.
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for path in files:
            archive.write(path, path.name)
    return buffer.getvalue()


def archive_of(packed: bytes) -> Archive:
    return Archive(packed, hashlib.sha256(packed).hexdigest())


def pieces(archive: Archive) -> Iterator[common_pb2.GetTokenizerChunk]:
    packed = archive.packed
    last = max(0, len(packed) - 1) // PIECE_BYTES * PIECE_BYTES
    for begin in range(0, last, PIECE_BYTES):
        yield common_pb2.GetTokenizerChunk(data=packed[begin : begin + PIECE_BYTES])
    yield common_pb2.GetTokenizerChunk(data=packed[last:], sha256=archive.sha256)
