"""The models in the hub's cache on this disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from penstock.services.commands.failure import FAILED, CommandError

_PREFIX = "models--"


class CachedModel(msgspec.Struct, frozen=True):
    """One repository in the cache."""

    name: str
    folder: Path
    """All that is kept of it."""
    snapshot: Path | None
    """The folder that `penstock serve` takes; ``None``: its first download never got so far."""
    size: int
    """Bytes on the disk, of all versions and of what is not whole yet."""


def cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def cached_models() -> list[CachedModel]:
    """Sorted by name."""
    return sorted(_found(cache_folder()), key=lambda model: model.name.lower())


def cached_model(name: str) -> CachedModel:
    """Raises ``CommandError`` where there is none."""
    from penstock.protocol.suggestions import closest

    found = {model.name: model for model in cached_models()}
    if name not in found:
        likely = closest(name, found)
        advice = f": did you mean {likely}?" if likely else "; `penstock list` shows what is"
        raise CommandError(f"{name} is not in the hub's cache {cache_folder()}{advice}", FAILED)
    return found[name]


def remove(model: CachedModel) -> None:
    """Remove it with all its versions. Raises ``CommandError``."""
    try:
        shutil.rmtree(model.folder)
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}", FAILED) from None
    shutil.rmtree(model.folder.parent / ".locks" / model.folder.name, ignore_errors=True)


def _found(cache: Path) -> Iterator[CachedModel]:
    try:
        entries = list(os.scandir(cache))
    except OSError:
        return
    for entry in entries:
        organisation, _, model = entry.name.removeprefix(_PREFIX).partition("--")
        if entry.name.startswith(_PREFIX) and model and entry.is_dir(follow_symlinks=False):
            folder = Path(entry.path)
            name = f"{organisation}/{model}"
            yield CachedModel(name, folder, _snapshot(folder), _size(folder))


def _snapshot(folder: Path) -> Path | None:
    """Of the branch main, else the newest."""
    try:
        commit = (folder / "refs" / "main").read_text().strip()
        if commit and (folder / "snapshots" / commit).is_dir():
            return folder / "snapshots" / commit
    except (OSError, UnicodeDecodeError):
        pass
    try:
        rest = [one for one in (folder / "snapshots").iterdir() if one.is_dir()]
    except OSError:
        return None
    return max(rest, key=lambda one: one.stat().st_mtime, default=None)


def _size(folder: Path) -> int:
    """Links count nothing: what they lead to stands in the folder too."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(place, name))
            except OSError:
                continue
            total += 0 if os.path.islink(os.path.join(place, name)) else status.st_size
    return total


def gigabytes(size: int) -> str:
    """As people read it."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"
