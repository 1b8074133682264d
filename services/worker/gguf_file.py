"""The header of a GGUF file, as far as weights need it.

Layout (ggml ``docs/gguf.md``): magic, version, counts, pairs of key and value, then of each tensor
its name, its dimensions, the fastest first, its type and its place in the data, which begins at a
multiple of ``general.alignment``. Names are brought into those of the family's safetensors files.
Everything is checked against the file before it is used. Needs no torch.
"""

from __future__ import annotations

import functools
import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

from penstock.protocol.model_info import BadModelFolder
from penstock.services.worker.safetensors_file import (
    MAX_DIMENSIONS,
    MAX_TENSORS,
    TensorEntry,
    shown,
)

ENDING = ".gguf"
BLOCKS = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip
"""Kinds of blocks that are read: numbers and bytes of each."""
_PLAIN = {0: ("F32", 4), 1: ("F16", 2), 30: ("BF16", 2), 28: ("F64", 8)}
_QUANTIZED = {
    2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
}  # fmt: skip
_NOT_READ = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_NUMBERS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MOST_PAIRS, _LONGEST_TEXT, _MOST_ITEMS = 100_000, 1 << 24, 1 << 24
FAMILIES = ("llama", "qwen2", "qwen3")
"""Architectures whose tensors are read, as GGUF names them."""
_TOP = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "rope_freqs": "rope_freqs",
}  # fmt: skip
_OF_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


def gguf_file(folder: Path) -> Path | None:
    """The one GGUF file of a folder; ``None``: there is none. Raises ``BadModelFolder`` where there
    are several."""
    found = sorted(folder.glob(f"*{ENDING}"))
    if len(found) > 1:
        names = ", ".join(shown(path.name) for path in found)
        raise BadModelFolder(f"{folder}: several GGUF files: {names}; leave one, which is served")
    return found[0] if found else None


def read_gguf(path: Path) -> GgufFile:
    """As ``GgufFile``; a header, which may hold a vocabulary, is read once as long as the file is
    the same."""
    try:
        status = path.stat()
    except OSError as error:
        raise BadModelFolder(f"{path}: {error.strerror or error}") from None
    return _read_once(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _read_once(path: Path, size: int, changed: int) -> GgufFile:
    return GgufFile(path)


class GgufFile:
    """What ``SafetensorsFile`` is of another format."""

    def __init__(self, path: Path) -> None:
        """Raises ``BadModelFolder`` that names file and cause."""
        self.path = path
        self.entries: dict[str, TensorEntry] = {}
        self.architecture = ""
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                self._read(_Header(path, file), size)
        except OSError as error:
            raise BadModelFolder(f"{path}: {error.strerror or error}") from None

    def _read(self, header: _Header, size: int) -> None:
        if header.take(4) != _MAGIC:
            raise header.error("no GGUF file")
        version = header.number(4)
        if version not in _VERSIONS:
            raise header.error(f"version {version}; versions 2 and 3 are read")
        tensors, pairs = header.number(10), header.number(10)
        if tensors > MAX_TENSORS or pairs > _MOST_PAIRS:
            raise header.error(f"{tensors} tensors and {pairs} keys cannot be")
        known: dict[str, Any] = {}
        for _ in range(pairs):
            key, kind = header.text(), header.number(4)
            known[key] = header.value(kind)
        self.architecture = str(known.get("general.architecture"))
        if self.architecture not in FAMILIES:
            raise header.error(
                f"architecture {shown(self.architecture)}; GGUF files are read of "
                f"{', '.join(FAMILIES)}; for others use safetensors"
            )
        alignment = known.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20:
            raise header.error(f"general.alignment {shown(alignment)}")
        found = [self._entry(header) for _ in range(tensors)]
        begin = -(-header.position // alignment) * alignment
        for name, entry in found:
            moved = entry._replace(begin=entry.begin + begin, end=entry.end + begin)
            if moved.end > size:
                raise header.error(
                    f"truncated: tensor {shown(name)} ends at byte {moved.end}, the file at {size}"
                )
            if name in self.entries:
                raise header.error(f"tensor {shown(name)} is there twice")
            self.entries[name] = moved

    def _entry(self, header: _Header) -> tuple[str, TensorEntry]:
        """With its place from the begin of the data on."""
        stored = header.text()
        where = f"tensor {shown(stored)}"
        count = header.number(4)
        if not 0 < count <= MAX_DIMENSIONS:
            raise header.error(f"{where}: {count} dimensions")
        shape = tuple(reversed([header.number(10) for _ in range(count)]))
        kind, begin = header.number(4), header.number(10)
        if kind in _PLAIN:
            dtype, item = _PLAIN[kind]
            return name_of(stored), TensorEntry(
                dtype, shape, begin, begin + math.prod(shape) * item
            )
        if kind not in _QUANTIZED:
            name = _NOT_READ.get(kind, f"number {kind}")
            raise header.error(
                f"{where} is of the kind {name}; read are {', '.join(BLOCKS)}: make the file again "
                "in one of them"
            )
        dtype = _QUANTIZED[kind]
        numbers, size = BLOCKS[dtype]
        if shape[-1] % numbers:
            raise header.error(f"{where}: {shape[-1]} numbers are no blocks of {numbers}")
        shape = (*shape[:-1], shape[-1] // numbers * size)
        return name_of(stored), TensorEntry(dtype, shape, begin, begin + math.prod(shape))


def name_of(stored: str) -> str:
    """``blk.3.attn_q.weight`` → ``model.layers.3.self_attn.q_proj.weight``; others stay."""
    parts = stored.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isdecimal() and parts[2] in _OF_LAYER:
        return f"model.layers.{parts[1]}.{_OF_LAYER[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _TOP:
        return f"{_TOP[parts[0]]}.{parts[1]}"
    return stored


class _Header:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self.position = 0

    def error(self, text: str) -> BadModelFolder:
        return BadModelFolder(f"{self._path}: {text}")

    def take(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) < count:
            raise self.error("truncated within its header")
        self.position += count
        return data

    def number(self, kind: int) -> Any:
        form = _NUMBERS[kind]
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return value

    def text(self) -> str:
        length = self.number(10)
        if length > _LONGEST_TEXT:
            raise self.error(f"a text of {length} bytes in its header")
        return self.take(length).decode(errors="replace")

    def value(self, kind: int) -> Any:
        """Of arrays only the length."""
        if kind in _NUMBERS:
            return self.number(kind)
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise self.error(f"a value of the kind {kind} in its header")
        item, count = self.number(4), self.number(10)
        if count > _MOST_ITEMS or item not in (*_NUMBERS, _STRING):
            raise self.error(f"an array of {count} values of the kind {item} in its header")
        if item == _STRING:
            for _ in range(count):
                self.text()
        else:
            self.take(count * struct.calcsize(_NUMBERS[item]))
        return count
