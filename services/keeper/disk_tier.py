"""Blocks on disk: a file each, found again after a restart.

    FOLDER/<space>/<first byte of the key>/<key>.kv

A file gets its name when it is whole, so whoever reads it finds all of it or nothing, as long as
the machine lives; what a loss of power tears fails its checksum. Servers may share a folder.
Files that are being written end in ``.part`` and are locked by their writers: a scan removes
those whose writers are dead.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import stat
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path

from penstock.protocol.kv_slots import holds
from penstock.services.keeper.tier import BlockName

_NAME = re.compile(r"[0-9a-f]{32}\.kv")
_SPACE = re.compile(r"[0-9a-f]{32}")
_SHARD = re.compile(r"[0-9a-f]{2}")
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class DiskTier:
    """A bounded folder of blocks. What its methods share is guarded by a lock."""

    def __init__(self, folder: Path, limit: int) -> None:
        """``limit``: bytes of all files."""
        self._folder, self.limit = folder, limit
        self._lock = threading.Lock()
        self._sizes: OrderedDict[BlockName, int] = OrderedDict()
        """Those used least lately first."""
        self._parts = 0
        self.used = 0
        self.corrupted = 0
        """Files that were not what their names say."""
        self.foreign = 0
        """Files of the folder that are no blocks; they are left alone."""
        self.failed_writes = 0
        self.gone: list[BlockName] = []
        """What it has no more since somebody emptied this list."""

    # --- looking

    def has(self, name: BlockName) -> bool:
        return name in self._sizes

    def keys(self, space: bytes) -> list[bytes]:
        """All blocks of a space, those used least lately first."""
        with self._lock:
            return [name.key for name in self._sizes if name.space == space]

    def latest(self, count: int) -> list[tuple[bytes, int]]:
        """Spaces with the size of most of their files, at most so many, those used last first."""
        found: dict[bytes, Counter[int]] = {}
        with self._lock:
            for name, size in reversed(self._sizes.items()):
                found.setdefault(name.space, Counter())[size] += 1
        return [
            (space, sizes.most_common(1)[0][0])
            for space, sizes in itertools.islice(found.items(), count)
        ]

    def scan(self) -> None:
        """Find what former keepers have left, and remove what they left half done."""
        found: list[tuple[int, BlockName, int]] = []
        for entry, space in self._entries():
            if entry.name.endswith(".part"):
                _remove_abandoned(entry.path)
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue  # another server of this folder has just removed it
            is_file = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
            if not is_file or not _NAME.fullmatch(entry.name):
                self.foreign += 1
                continue
            name = BlockName(space, bytes.fromhex(entry.name[:-3]))
            found.append((status.st_mtime_ns, name, status.st_size))
        with self._lock:
            newer, self._sizes = self._sizes, OrderedDict()
            for _, name, size in sorted(found):
                self._sizes[name] = size
            self._sizes |= newer
            for name in newer:
                self._sizes.move_to_end(name)
            self.used = sum(self._sizes.values())
        self._shrink()

    def _entries(self) -> Iterator[tuple[os.DirEntry[str], bytes]]:
        for space in _listed(self._folder):
            if not _SPACE.fullmatch(space.name) or not _is_folder(space):
                self.foreign += 1
                continue
            for shard in _listed(space.path):
                if not _SHARD.fullmatch(shard.name) or not _is_folder(shard):
                    self.foreign += 1
                    continue
                for entry in _listed(shard.path):
                    yield entry, bytes.fromhex(space.name)

    # --- blocks

    def get(self, name: BlockName, into: memoryview) -> bool:
        """Raises nothing: what cannot be read is not there."""
        path = self._path(name)
        try:
            descriptor = os.open(path, _READ)
        except OSError:
            self._forget(name)
            return False
        try:
            status = os.fstat(descriptor)
            whole = status.st_size == len(into) and os.preadv(descriptor, [into], 0) == len(into)
            if whole and status.st_uid == os.getuid() and holds(into, name.space, name.key):
                with contextlib.suppress(OSError):
                    os.utime(descriptor)
                with self._lock:
                    if name in self._sizes:
                        self._sizes.move_to_end(name)
                return True
        except OSError:
            pass
        finally:
            os.close(descriptor)
        self.drop(name, corrupted=True)
        return False

    def put(self, name: BlockName, block: memoryview) -> bool:
        if name in self._sizes:
            return True
        path = self._path(name)
        self._parts += 1
        part = path.with_name(f"{path.stem}.{os.getpid()}.{self._parts}.part")
        try:
            for folder in (path.parent.parent, path.parent):
                folder.mkdir(mode=0o700, exist_ok=True)
            _write(part, block, path)
        except OSError:
            self.failed_writes += 1
            with contextlib.suppress(OSError):
                part.unlink()
            return False
        with self._lock:
            self.used += len(block) - self._sizes.pop(name, 0)  # a scan may have found it
            self._sizes[name] = len(block)
        self._shrink()
        return name in self._sizes

    def touch(self, name: BlockName) -> None:
        """A block was used, though it was not read from here."""
        with self._lock:
            if name in self._sizes:
                self._sizes.move_to_end(name)

    def drop(self, name: BlockName, *, corrupted: bool) -> None:
        """Remove a block that must not be used."""
        with self._lock:
            self.corrupted += corrupted
        with contextlib.suppress(OSError):
            self._path(name).unlink()
        self._forget(name)

    def _forget(self, name: BlockName) -> None:
        with self._lock:
            size = self._sizes.pop(name, None)
            if size is not None:
                self.used -= size
                self.gone.append(name)

    def _shrink(self) -> None:
        while self.used > self.limit:
            with self._lock:
                name = next(iter(self._sizes))
            self.drop(name, corrupted=False)

    def take_gone(self) -> list[BlockName]:
        with self._lock:
            gone, self.gone = self.gone, []
        return gone

    def _path(self, name: BlockName) -> Path:
        key = name.key.hex()
        return self._folder / name.space.hex() / key[:2] / f"{key}.kv"


def _write(part: Path, block: memoryview, path: Path) -> None:
    """The file is locked until it has its name: a scan takes it for abandoned otherwise."""
    descriptor = os.open(part, _WRITE, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not os.fstat(descriptor).st_nlink:  # a scan came between: taken for abandoned
            raise FileNotFoundError(part)
        written = 0
        while written < len(block):
            written += os.write(descriptor, block[written:])
        part.rename(path)
    finally:
        os.close(descriptor)


def _remove_abandoned(path: str) -> None:
    """Remove a file that nobody writes any more."""
    try:
        descriptor = os.open(path, _READ)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except OSError:
        pass  # its writer lives
    finally:
        os.close(descriptor)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _listed(path: Path | str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError:
        return []
