"""The header of one safetensors file.

Layout: 8 bytes little endian length of the header, a JSON header, then the data; the header gives
each tensor's dtype, shape and ``data_offsets`` relative to the data (safetensors format
description). Everything the header claims is checked against the file before it is used. Needs no
torch: a damaged file is found before seconds go into importing that.
"""

from __future__ import annotations

import json
import math
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from penstock.protocol.model_info import LFS_POINTER, BadModelFolder

MAX_HEADER_BYTES = 100 * 1000 * 1000
MAX_TENSORS = 1_000_000
MAX_DIMENSIONS = 8
ITEM_BYTES = {
    "F32": 4, "F16": 2, "BF16": 2, "F64": 8,
    "I64": 8, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E8M0": 1,
}  # fmt: skip
"""The types that are read."""
WEIGHT_TYPES = ("F32", "F16", "BF16", "F64")
"""Those that plain weights may have; of the others are quantized ones."""
_LOOKED_AT = 64 * 1024
MAX_NAMED = 8
"""How many names an error lists of each kind."""
_LONGEST_SHOWN = 120


def shown(name: object) -> str:
    """A name from a file as an error shows it: quoted, and no longer than a line."""
    text = repr(name)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "…"


def listed(names: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def unique_keys(path: Path, part: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """For ``json.loads``: a key that appears twice raises ``BadModelFolder``, where JSON readers
    silently take the last one."""

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice = listed([shown(name) for name, count in counts.items() if count > 1])
            raise BadModelFolder(f"{path}: {part} names more than once: {twice}")
        return found

    return table


class TensorEntry(NamedTuple):
    """Where a tensor lies."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Offset in the file."""
    end: int


class SafetensorsFile:
    """The checked header of one file."""

    def __init__(self, path: Path) -> None:
        """Read and check the header. Raises ``BadModelFolder`` that names file and cause."""
        self.path = path
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise BadModelFolder(f"{path}: not a regular file")
            with path.open("rb") as file:
                self.entries = self._read_header(file, status.st_size)
        except FileNotFoundError:
            raise BadModelFolder(f"{path}: no such file") from None
        except OSError as error:
            raise BadModelFolder(f"{path}: {error.strerror or error}") from None

    def _read_header(self, file: BinaryIO, size: int) -> dict[str, TensorEntry]:
        start = file.read(len(LFS_POINTER))
        if start == LFS_POINTER:
            raise BadModelFolder(
                f"{self.path}: a Git LFS pointer, not the weights; fetch them with `git lfs pull`"
            )
        if size < 8:
            raise BadModelFolder(f"{self.path}: {size} bytes is too short for a safetensors file")
        length = int.from_bytes(start[:8], "little")
        if not any(start) and not any(file.read(_LOOKED_AT)):
            raise BadModelFolder(
                f"{self.path}: filled with zeros: a download that was interrupted; fetch it again"
            )
        if length > MAX_HEADER_BYTES or 8 + length > size:
            raise BadModelFolder(
                f"{self.path}: the header claims {length} bytes, the file has {size}: "
                "truncated or no safetensors file"
            )
        file.seek(8)
        raw = file.read(length)
        try:
            header = json.loads(raw, object_pairs_hook=unique_keys(self.path, "the header"))
        except (ValueError, RecursionError) as error:
            if isinstance(error, BadModelFolder):
                raise
            raise BadModelFolder(f"{self.path}: the header is not JSON: {error}") from None
        if not isinstance(header, dict):
            raise BadModelFolder(f"{self.path}: the header is no object")
        header.pop("__metadata__", None)
        if len(header) > MAX_TENSORS:
            raise BadModelFolder(f"{self.path}: {len(header)} tensors, at most {MAX_TENSORS}")
        entries = {name: self._entry(name, value, 8 + length) for name, value in header.items()}
        self._check_extent(entries, 8 + length, size)
        return entries

    def _entry(self, name: str, value: Any, data: int) -> TensorEntry:
        where = f"{self.path}: tensor {shown(name)}"
        try:
            dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise BadModelFolder(f"{where}: malformed header entry") from None
        numbers = [begin, end, *(shape if isinstance(shape, list) else [None])]
        if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in numbers):
            raise BadModelFolder(f"{where}: malformed header entry")
        if len(shape) > MAX_DIMENSIONS:
            raise BadModelFolder(f"{where}: {len(shape)} dimensions")
        size = ITEM_BYTES.get(dtype)
        if size is not None and math.prod(shape) * size != end - begin:
            raise BadModelFolder(
                f"{where}: shape {shown(shape)} of {dtype} is not the {end - begin} bytes "
                "it lies in"
            )
        return TensorEntry(dtype, tuple(shape), data + begin, data + end)

    def _check_extent(self, entries: dict[str, TensorEntry], data: int, size: int) -> None:
        """The tensors fill the file without overlap, gap, or end beyond it."""
        reached, previous = data, ""
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.end > size:
                raise BadModelFolder(
                    f"{self.path}: truncated: tensor {shown(name)} ends at byte {entry.end}, "
                    f"the file at {size}"
                )
            if entry.begin != reached or entry.end < entry.begin:
                raise BadModelFolder(
                    f"{self.path}: tensor {shown(name)} does not begin where {shown(previous)} ends"
                )
            reached, previous = entry.end, name
        if reached != size:
            raise BadModelFolder(f"{self.path}: {size - reached} bytes after the last tensor")
