"""A checkpoint folder: ``model.safetensors``, shards named by ``model.safetensors.index.json``, or
one GGUF file.

The headers of all files are read and compared with what the model expects before any memory is
taken, and everything that is wrong is named at once; what the files alone show, before torch is
imported. No other format is read: nothing in a checkpoint is ever executed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from penstock.protocol.conversion import weights_command
from penstock.protocol.model_info import BadModelFolder, read_text
from penstock.services.worker.gguf_file import GgufFile, gguf_file, read_gguf
from penstock.services.worker.load_report import LoadReport, ReadProgress
from penstock.services.worker.safetensors_file import (
    WEIGHT_TYPES,
    SafetensorsFile,
    TensorEntry,
    listed,
    shown,
    unique_keys,
)

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.services.worker.quantization.format import StoredTensor
    from penstock.services.worker.weight_reading import PinnedBuffers, StoredSlice, TensorRead

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PIECE_BYTES = 1 << 20
"""Compared at once."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5")
"""Formats of other loaders: reading most of them can run code."""
_CONVERTIBLE = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""What transformers reads as a model's weights."""


class Checkpoint:
    """The files of a folder and which holds which tensor."""

    def __init__(self, folder: Path) -> None:
        """Read every header. Raises ``BadModelFolder``."""
        self.folder = folder
        self._files: dict[str, SafetensorsFile | GgufFile] = {}
        """File of each tensor, by the tensor's name."""
        if (folder / SINGLE).exists():
            file = SafetensorsFile(folder / SINGLE)
            self._files = dict.fromkeys(file.entries, file)
        elif (folder / INDEX).exists():
            self._open_shards(folder / INDEX)
        elif (path := gguf_file(folder)) is not None:
            other = read_gguf(path)
            self._files = dict.fromkeys(other.entries, other)
        else:
            raise BadModelFolder(f"{folder}: neither {SINGLE} nor {INDEX}; {_instead(folder)}")

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors together."""
        entries = [file.entries[name] for name, file in self._files.items()]
        return sum(entry.end - entry.begin for entry in entries)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor, by its name."""
        return {name: file.entries[name].shape for name, file in self._files.items()}

    def __contains__(self, name: str) -> bool:
        """Whether a tensor is there."""
        return name in self._files

    def entry(self, name: str) -> TensorEntry:
        """Of a tensor that is there."""
        return self._files[name].entries[name]

    def place(self, name: str) -> str:
        """A tensor that is there, for errors."""
        return f"{shown(name)} in {self._files[name].path.name}"

    def read(self, name: str, ranges: tuple[range, ...] | None = None) -> Tensor:
        """A small tensor, in memory of its own. ranges: of its dimensions, by default all of it.
        Raises ``BadModelFolder``."""
        import torch

        from penstock.services.worker.weight_reading import DTYPES, StoredSlice, WeightReader

        entry = self.entry(name)
        ranges = ranges or tuple(map(range, entry.shape))
        target = torch.empty(tuple(map(len, ranges)), dtype=DTYPES[entry.dtype])
        part = StoredSlice(name, target, *(each.start for each in ranges))
        WeightReader([self._read(part)]).run(lambda progress: None, 1)
        return target

    def equal(self, first: str, second: str) -> bool:
        """Whether two tensors are stored with the same type, shape and bytes: reads them up to the
        first difference. Raises ``BadModelFolder``."""
        files = [self._files[name] for name in (first, second)]
        one, other = files[0].entries[first], files[1].entries[second]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        try:
            with files[0].path.open("rb") as ours, files[1].path.open("rb") as theirs:
                ours.seek(one.begin)
                theirs.seek(other.begin)
                left = one.end - one.begin
                while left > 0:
                    size = min(left, _PIECE_BYTES)
                    if ours.read(size) != theirs.read(size):
                        return False
                    left -= size
        except OSError as error:
            paths = " or ".join(dict.fromkeys(str(file.path) for file in files))
            raise BadModelFolder(f"{paths}: {error.strerror or error}") from None
        return True

    def _open_shards(self, index: Path) -> None:
        """Read the index and the header of each shard that it names. Links may lead out of the
        folder (the hub's cache is made of them), names may not."""
        weight_map = _read_weight_map(index)
        names = dict.fromkeys(_shard_name(index, name) for name in weight_map.values())
        gone = [shown(name) for name in sorted(names) if not (self.folder / name).exists()]
        if gone:
            raise BadModelFolder(
                f"{index}: no such file beside it: {listed(gone)}; "
                f"{len(gone)} of {len(names)} shards are missing: fetch them"
            )
        shards = {name: SafetensorsFile(self.folder / name) for name in names}
        absent = [
            f"{shown(name)} in {shard}"
            for name, shard in weight_map.items()
            if name not in shards[shard].entries
        ]
        if absent:
            raise BadModelFolder(f"{index}: tensors not in the file it names: {listed(absent)}")
        twice = []
        for file in shards.values():
            for name in file.entries:
                first = self._files.setdefault(name, file)
                if first is not file:
                    twice.append(f"{shown(name)} in {first.path.name} and {file.path.name}")
        if twice:
            raise BadModelFolder(f"{index}: tensors in more than one file: {listed(twice)}")

    def check(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        harmless: Callable[[str], bool],
        quantized: Mapping[str, StoredTensor] = MappingProxyType({}),
    ) -> None:
        """Compare all names, shapes and dtypes with what the model expects.

        ``harmless`` tells which surplus names are ignored; quantized: what it expects beside
        ``shapes``. Raises one ``BadModelFolder`` that lists everything missing, surplus, misshapen
        or of a wrong type.
        """
        required = [name for name, stored in quantized.items() if not stored.optional]
        missing = [shown(name) for name in (*shapes, *required) if name not in self._files]
        surplus, misshapen, mistyped, mistyped_codes = [], [], [], []
        for name in self._files:
            entry, place = self.entry(name), self.place(name)
            stored = quantized.get(name)
            if stored is None and name not in shapes:
                if not harmless(name):
                    surplus.append(place)
                continue
            allowed = (shapes[name],) if stored is None else stored.shapes
            if entry.shape not in allowed:
                of = f" ({stored.of})" if stored is not None and stored.of else ""
                wanted = " or ".join(str(list(shape)) for shape in allowed)
                misshapen.append(f"{place}: {list(entry.shape)} instead of {wanted}{of}")
            if stored is None and entry.dtype not in WEIGHT_TYPES:
                mistyped.append(f"{place}: {shown(entry.dtype)}")
            if stored is not None and entry.dtype not in stored.types:
                words = " or ".join(stored.types)
                mistyped_codes.append(f"{place}: {shown(entry.dtype)} instead of {words}")
        kinds = {
            "missing": missing,
            "not of this model": surplus,
            "of a wrong shape": misshapen,
            f"of a type other than {', '.join(WEIGHT_TYPES)}": mistyped,
            "of a wrong type": mistyped_codes,
        }
        wrong = [f"{kind}: {listed(names)}" for kind, names in kinds.items() if names]
        if wrong:
            raise BadModelFolder(f"{self.folder}: tensors {'; '.join(wrong)}")

    def load(
        self,
        targets: Mapping[str, Tensor] | Sequence[StoredSlice],
        progress: Callable[[str], None],
        may_be_zero: Callable[[str], bool],
        buffers: PinnedBuffers | None = None,
        before: ReadProgress | None = None,
    ) -> LoadReport:
        """Copy every tensor of ``targets``, or slices of them, in place. Call ``check`` first.
        buffers: for targets on a GPU; before: what was read of the model already, where these are
        a part of it.

        A tensor of which every byte is zero is damage (an interrupted download leaves zeros)
        unless ``may_be_zero`` says of its name that models mean it. Raises ``BadModelFolder``.
        """
        from penstock.services.worker.weight_reading import StoredSlice, WeightReader

        slices = (
            [StoredSlice(*one) for one in targets.items()]
            if isinstance(targets, Mapping)
            else targets
        )
        reader = WeightReader([self._read(each) for each in slices], buffers)
        seconds = reader.run(
            lambda read: progress(str(read if before is None else read.behind(before)))
        )
        zeros = reader.zero_tensors
        self._refuse_zeros({each.name for each in slices}, zeros, may_be_zero)
        matrices = {each.name for each in slices if each.target.dim() > 1}
        return LoadReport(reader.total_bytes, seconds, [name for name in zeros if name in matrices])

    def _read(self, part: StoredSlice) -> TensorRead:
        from penstock.services.worker.weight_reading import DTYPES, TensorRead

        file, target = self._files[part.name], part.target
        entry, dtype = file.entries[part.name], DTYPES[file.entries[part.name].dtype]
        pitch = math.prod(entry.shape[1:]) * dtype.itemsize
        begin = entry.begin + part.row * pitch + part.column * dtype.itemsize
        divided = target.shape[1:] != entry.shape[1:]
        return TensorRead(part.name, file.path, begin, dtype, target, pitch if divided else 0)

    def _refuse_zeros(
        self, names: Collection[str], zeros: list[str], may_be_zero: Callable[[str], bool]
    ) -> None:
        damaged = [name for name in zeros if not may_be_zero(name)]
        if not damaged:
            return
        zero = set(zeros)
        for path in dict.fromkeys(self._files[name].path for name in damaged):
            if all(name in zero for name in names if self._files[name].path == path):
                raise BadModelFolder(
                    f"{path}: every tensor is all zeros: a download that was interrupted; "
                    "fetch the file again"
                )
        places = [f"{shown(name)} in {self._files[name].path.name}" for name in damaged]
        raise BadModelFolder(
            f"{self.folder}: tensors of nothing but zeros: {listed(places)}; the files are "
            "damaged: fetch them again"
        )


def _read_weight_map(index: Path) -> dict[str, Any]:
    try:
        table = json.loads(read_text(index), object_pairs_hook=unique_keys(index, "the index"))
    except BadModelFolder:
        raise
    except (ValueError, RecursionError) as error:
        raise BadModelFolder(f"{index}: not valid JSON: {error}") from None
    weight_map = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadModelFolder(f"{index}: weight_map must be an object of tensor → file")
    return weight_map


def _shard_name(index: Path, name: Any) -> str:
    """A shard is a plain file name: it can lie nowhere but in the folder."""
    if not isinstance(name, str) or not name or Path(name).name != name or "\\" in name:
        raise BadModelFolder(f"{index}: {shown(name)} is no plain file name in the folder")
    if not name.endswith(".safetensors") or "\0" in name:
        raise BadModelFolder(f"{index}: {shown(name)}: shards are .safetensors files")
    return name


def _instead(folder: Path) -> str:
    """What the folder holds in their place."""
    names = sorted(path.name for path in folder.iterdir())
    pickles = [shown(name) for name in names if name.endswith(_PICKLES)]
    if pickles:
        said = (
            f"{listed(pickles)}: other formats are never opened, because reading them can run code"
        )
        if any(name in names for name in _CONVERTIBLE):
            return f"{said}; if you trust it, convert it: {weights_command(folder)}"
        return f"{said}; convert the checkpoint to safetensors"
    others = [shown(name) for name in names if name.endswith(".safetensors")]
    if others:
        return f"{listed(others)} can be read only with that index beside them; fetch it"
    return "only checkpoints in the safetensors format are loaded"
