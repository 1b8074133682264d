"""Whether Triton's cache holds a model's kernels: told by a small file in it, a *marker*.

The marker's name is a hash of all that decides which kernels are compiled, so another version, card
or size asks for another marker. It is a hint: where it is wrong, kernels are compiled when they are
launched first.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from penstock.protocol.config.machine import triton_cache_folder
from penstock.services.worker.kernel_needs import KernelNeeds

_ROOT = Path(__file__).resolve().parents[2]
_SOURCES = "kernels/gpu", "services/worker/gpu", "services/worker/models"
_LIBRARY = "_C/libtriton.so"
_GROUP = "__grp__"
"""Prefix of Triton's files that name the files of a kernel."""


class _Marker(msgspec.Struct):
    folder: str
    """Where the cache lay."""
    variants: list[str]
    """``KernelNeeds.variants`` whose kernels are there."""


class KernelCache(NamedTuple):
    """The cache, for one model on one kind of device."""

    folder: Path
    marker: Path

    @property
    def lock(self) -> Path:
        """Locked by who compiles."""
        return self.marker.with_suffix(".lock")

    def holds(self, needs: KernelNeeds) -> bool:
        """Whether all of these kernels were compiled into it, here or wherever it has come from."""
        self.settle()
        known = self._read()
        return known is not None and set(needs.variants) <= set(known.variants)

    def settle(self) -> None:
        """Make it whole if it was copied to where it lies. Raises ``OSError``."""
        known = self._read()
        if known is not None and known.folder != str(self.folder):
            move_paths(self.folder)
            self._write(known.variants)

    def complete(self, needs: KernelNeeds) -> None:
        """All of these kernels are in it now. Raises ``OSError``."""
        known = self._read()
        self._write(sorted({*needs.variants, *(known.variants if known else [])}))

    def _read(self) -> _Marker | None:
        try:
            return msgspec.json.decode(self.marker.read_bytes(), type=_Marker)
        except (OSError, msgspec.MsgspecError):
            return None

    def _write(self, variants: list[str]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        _replace(self.marker, msgspec.json.encode(_Marker(str(self.folder), variants)))


def kernel_cache(needs: KernelNeeds) -> KernelCache:
    """Of this process's Triton. Raises ``OSError`` where its files cannot be read."""
    folder = triton_cache_folder()
    digest = hashlib.sha256(msgspec.json.encode(replace(needs, forms=(), may_be_cut=False)))
    digest.update(_triton().encode())
    for name in _SOURCES:
        for path in sorted((_ROOT / name).glob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return KernelCache(folder, folder / f"penstock-{digest.hexdigest()[:24]}.json")


def _triton() -> str:
    """Which Triton is installed, without importing it."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return ""
    package = Path(found.origin).parent
    version = next(
        (line for line in Path(found.origin).read_text().split("\n") if "__version__" in line), ""
    )
    return f"{version} {(package / _LIBRARY).stat().st_size}"


def move_paths(folder: Path) -> None:
    """Make a cache that was copied to ``folder`` whole: Triton's files name each other by their
    absolute paths, and a kernel whose files are not found there is compiled again."""
    for group in folder.glob(f"*/{_GROUP}*"):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            named = json.loads(group.read_text())
            moved = {name: str(group.parent / name) for name in named["child_paths"]}
            if moved != named["child_paths"]:
                _replace(group, json.dumps({**named, "child_paths": moved}).encode())


def _replace(path: Path, content: bytes) -> None:
    """Write a file that others may be reading."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_bytes(content)
    new.replace(path)
