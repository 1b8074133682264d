"""Where responses are kept: in the memory of a frontend, or in a directory that several share; on
a server: ``valkey_store``.

Both are bounded in bytes and in number. Where there is no more room, the owner (an API key, or
everybody where there are no keys) who holds the most bytes loses what was used longest ago: nobody
makes others lose theirs. Each owner finds only his own.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import stat
import time
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec

from penstock.protocol.config import ConfigError
from penstock.services.frontend.dialects.responses.items import is_response_id

MAX_RESPONSES = 65_536
_ROOM = 0.9
"""A full directory is emptied down to this share of its limits, so that not every response has to
look through it."""
_LOOK_SECONDS = 30.0
"""Another process may have filled the directory since it was looked through."""
_NAME = "{}.response"
_OVERHEAD_BYTES = 512
"""About what a response takes in memory beside its bytes."""

_log = logging.getLogger("penstock.frontend")


class StoredResponse(msgspec.Struct, frozen=True):
    """A response and what it was made from."""

    response: bytes
    """The JSON of the response."""
    input: bytes
    """The JSON array of its own input's items."""
    previous: str = ""
    """The response that it continues; empty: none."""

    def size(self) -> int:
        return len(self.response) + len(self.input) + len(self.previous) + _OVERHEAD_BYTES


class ResponseStore(Protocol):
    """Keeps responses by owner and id."""

    async def open(self) -> None:
        """The process begins to serve."""

    async def close(self) -> None:
        """It ends."""

    async def get(self, owner: str, name: str) -> StoredResponse | None:
        """``None`` for what is not there."""

    async def put(self, owner: str, name: str, kept: StoredResponse) -> bool:
        """Whether it is kept now."""

    async def delete(self, owner: str, name: str) -> bool:
        """Whether it was there."""


class MemoryStore:
    """Responses in the memory of one process."""

    def __init__(self, max_bytes: int, max_number: int = MAX_RESPONSES) -> None:
        self.used = 0
        """Bytes."""
        self._number = 0
        self._max_bytes = max_bytes
        self._max_number = max_number
        self._kept: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._used_by: Counter[str] = Counter()
        """Owner → bytes."""

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    async def open(self) -> None:
        """It needs nothing."""

    async def close(self) -> None:
        """It holds nothing that outlives its process."""

    async def get(self, owner: str, name: str) -> StoredResponse | None:
        return self.find(owner, name)

    async def put(self, owner: str, name: str, kept: StoredResponse) -> bool:
        return self.keep(owner, name, kept)

    async def delete(self, owner: str, name: str) -> bool:
        return self.drop(owner, name)

    def find(self, owner: str, name: str) -> StoredResponse | None:
        own = self._kept.get(owner)
        if own is None or name not in own:
            return None
        own.move_to_end(name)
        return own[name]

    def keep(self, owner: str, name: str, kept: StoredResponse) -> bool:
        self.drop(owner, name)
        size = kept.size()
        if size > self._max_bytes:
            return False
        self._kept.setdefault(owner, OrderedDict())[name] = kept
        self.used += size
        self._used_by[owner] += size
        self._number += 1
        while self.used > self._max_bytes or self._number > self._max_number:
            largest = max(self._used_by, key=self._used_by.__getitem__)
            self.drop(largest, next(iter(self._kept[largest])))
        return True

    def drop(self, owner: str, name: str) -> bool:
        own = self._kept.get(owner)
        if own is None or name not in own:
            return False
        size = own.pop(name).size()
        self.used -= size
        self._used_by[owner] -= size
        self._number -= 1
        if not own:
            del self._kept[owner], self._used_by[owner]
        return True


class DirectoryStore:
    """Responses as files that only this user can read, one for each, in a folder for each owner.

    A file is complete or not there. What cannot be read, or is not what was written, counts as not
    there and is removed.
    """

    def __init__(self, folder: Path, max_bytes: int, max_number: int = MAX_RESPONSES) -> None:
        """Raises ``ConfigError`` where the folder cannot be used."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._max_number = max_number
        self._bytes = self._number = 0
        self._looked_at = 0.0
        self._thread = ThreadPoolExecutor(1, "responses")
        """One thread, so that what is written is there for whoever asks afterwards."""
        _make_private(folder)

    async def open(self) -> None:
        """Its folder was made ready when it was configured."""

    async def close(self) -> None:
        """What is being written is written."""
        await asyncio.to_thread(self._thread.shutdown)

    async def get(self, owner: str, name: str) -> StoredResponse | None:
        if not is_response_id(name):
            return None
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._get, owner, name
        )

    async def put(self, owner: str, name: str, kept: StoredResponse) -> bool:
        if not is_response_id(name):
            return False
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._put, owner, name, kept
        )

    async def delete(self, owner: str, name: str) -> bool:
        if not is_response_id(name):
            return False
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._delete, owner, name
        )

    def _path(self, owner: str, name: str) -> Path:
        digest = hashlib.blake2b(owner.encode(), digest_size=16).hexdigest()
        return self._folder / digest / _NAME.format(name)

    def _get(self, owner: str, name: str) -> StoredResponse | None:
        path = self._path(owner, name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ENOENT:
                _log.warning("a stored response cannot be read: %s", error.strerror)
            return None
        with open(descriptor, "rb") as file:
            raw = file.read(self._max_bytes + 1)
        try:
            found = msgspec.msgpack.decode(raw, type=StoredResponse)
        except msgspec.MsgspecError:
            _log.warning("a stored response is not what was written and is removed")
            path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # it was used
        return found

    def _put(self, owner: str, name: str, kept: StoredResponse) -> bool:
        raw = msgspec.msgpack.encode(kept)
        if len(raw) > self._max_bytes:
            return False
        path = self._path(owner, name)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                partial.unlink()
            with open(os.open(partial, flags, 0o600), "wb") as file:
                file.write(raw)
            partial.replace(path)
        except OSError as error:
            _log.warning("a response could not be stored: %s", error.strerror)
            with contextlib.suppress(OSError):
                partial.unlink()
            return False
        self._bytes += len(raw)
        self._number += 1
        self._make_room()
        return True

    def _delete(self, owner: str, name: str) -> bool:
        try:
            self._path(owner, name).unlink()
        except OSError:
            return False
        return True

    def _make_room(self) -> None:
        """Where the folder holds too much, remove what was used longest ago of who holds most."""
        now = time.monotonic()
        full = self._bytes > self._max_bytes or self._number > self._max_number
        if not full and self._looked_at and now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = now
        found = self._files()
        used = {owner: sum(size for _, size, _ in files) for owner, files in found.items()}
        self._bytes = sum(used.values())
        self._number = sum(map(len, found.values()))
        if self._bytes <= self._max_bytes and self._number <= self._max_number:
            return
        for files in found.values():
            files.sort(reverse=True)
        while self._bytes > _ROOM * self._max_bytes or self._number > _ROOM * self._max_number:
            largest = max(used, key=used.__getitem__)
            _, size, path = found[largest].pop()
            with contextlib.suppress(OSError):
                os.unlink(path)
            used[largest] -= size
            self._bytes -= size
            self._number -= 1
            if not found[largest]:
                del used[largest]

    def _files(self) -> dict[str, list[tuple[float, int, str]]]:
        """Folder of an owner → (last use, bytes, path) of each file, also of those that were never
        completed; none without files."""
        found: dict[str, list[tuple[float, int, str]]] = {}
        for owner in _entries(self._folder):
            if not owner.is_dir(follow_symlinks=False):
                continue
            for entry in _entries(owner.path):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    found.setdefault(owner.path, []).append(
                        (status.st_mtime, status.st_size, entry.path)
                    )
        return found


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise ConfigError(
            f"--response-store {folder}: {error.strerror or error}; name a folder that can be made"
        ) from None
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"--response-store {folder} is no folder; name one, or memory or off")
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"--response-store {folder} may be entered by others; make it private: chmod 700"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--response-store {folder} cannot be written to")
