"""Random weights as safetensors files, made and written by all cores.

Every stretch of a tensor has a random stream of its own, named by the seed, the tensor and the
stretch: the bytes do not depend on how many threads made them, and no more than a few stretches are
in memory at a time.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.loadtest.environment import usable_cores

Array = np.ndarray[Any, np.dtype[Any]]
Shapes = dict[str, tuple[int, ...]]

STRETCH = 1 << 22
"""Numbers of a tensor that one job makes."""
MAX_FILE_BYTES = 4 << 30
"""Weights are spread over files of about so many bytes where no number of files is asked for."""
_TYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}


class _Stretch(NamedTuple):
    file: int
    """Descriptor."""
    at: int
    """Byte of the file."""
    name: str
    tensor: int
    """Number of the tensor, in the order of names."""
    number: int
    """The number of the stretch within the tensor."""
    length: int
    shape: tuple[int, ...]


def write_weights(folder: Path, shapes: Shapes, dtype: str, shards: int, seed: int) -> None:
    """Write ``model.safetensors``, or several files and their index.

    dtype: float32 or bfloat16; shards: files, 0: as many as ``MAX_FILE_BYTES`` asks for.
    """
    names = sorted(shapes)
    sizes = [int(np.prod(shapes[name])) * _TYPES[dtype][1] for name in names]
    groups = _in_equal_numbers(names, shards) if shards else _by_size(names, sizes)
    numbers = {name: number for number, name in enumerate(names)}
    files: dict[str, str] = {}
    for number, members in enumerate(groups, 1):
        file = "model.safetensors"
        if len(groups) > 1:
            file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        files.update(dict.fromkeys(members, file))
        _write_file(folder / file, {name: shapes[name] for name in members}, numbers, dtype, seed)
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _in_equal_numbers(names: list[str], shards: int) -> list[list[str]]:
    count = min(shards, len(names))
    groups: list[list[str]] = [[] for _ in range(count)]
    for position, name in enumerate(names):
        groups[position * count // len(names)].append(name)
    return groups


def _by_size(names: list[str], sizes: list[int]) -> list[list[str]]:
    """Files of ``MAX_FILE_BYTES`` at most, or of one tensor."""
    groups: list[list[str]] = [[]]
    held = 0
    for name, size in zip(names, sizes, strict=True):
        if groups[-1] and held + size > MAX_FILE_BYTES:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    return groups


def _write_file(path: Path, shapes: Shapes, numbers: dict[str, int], dtype: str, seed: int) -> None:
    """Header length, JSON header, data (the safetensors format).

    Its own Python functions know no bfloat16 without torch, and changed between versions.
    """
    kind, width = _TYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + int(np.prod(shape)) * width
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data begins at a multiple of 8 bytes
    with path.open("wb") as file, ThreadPoolExecutor(usable_cores()) as pool:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.flush()
        waiting: deque[Future[None]] = deque()
        for stretch in _stretches(file.fileno(), 8 + len(encoded), shapes, numbers, width):
            waiting.append(pool.submit(_write_stretch, stretch, dtype, seed))
            if len(waiting) > 4 * usable_cores():
                waiting.popleft().result()
        for job in waiting:
            job.result()


def _stretches(
    file: int, begin: int, shapes: Shapes, numbers: dict[str, int], width: int
) -> Iterator[_Stretch]:
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        for number, first in enumerate(range(0, size, STRETCH)):
            length = min(STRETCH, size - first)
            at = begin + first * width
            yield _Stretch(file, at, name, numbers[name], number, length, shape)
        begin += size * width


def _write_stretch(stretch: _Stretch, dtype: str, seed: int) -> None:
    stream = np.random.SeedSequence([seed, stretch.tensor, stretch.number])
    values = np.random.Generator(np.random.PCG64(stream)).standard_normal(
        stretch.length, dtype=np.float32
    )
    _scale(stretch.name, stretch.shape, values)
    data = _to_bfloat16(values) if dtype == "bfloat16" else values
    view, at = memoryview(data.tobytes()), stretch.at
    while len(view):
        written = os.pwrite(stretch.file, view, at)
        view, at = view[written:], at + written


def _scale(name: str, shape: tuple[int, ...], values: Array) -> None:
    """Standard normal numbers become a tensor's: of a scale that keeps activations near one."""
    if len(shape) == 1:
        values *= np.float32(0.3)
        values += np.float32(0.0 if name.endswith(".bias") else 1.0)
    elif name != "model.embed_tokens.weight":
        values *= np.float32(shape[1] ** -0.5)


def _to_bfloat16(values: Array) -> Array:
    """The upper halves of float32 values, rounded to nearest even, as uint16."""
    bits = values.view(np.uint32)
    odd = bits >> 16
    odd &= 1
    odd += 0x7FFF
    bits += odd
    return (bits >> 16).astype(np.uint16)
