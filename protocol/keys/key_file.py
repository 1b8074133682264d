"""A file of keys: one JSON object a line, and lines of comments.

It is read by frontends, which take a changed one without a restart, and changed by ``penstock
keys``: under a lock, into a new file that takes the old one's place.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.protocol.keys.record import KeyRecord
from penstock.protocol.private_file import PrivateFileError, read_private_text

MAX_KEYS = 65_536
MAX_LINE = 65_536
LOCK_S = 10.0
"""For another process to finish its change of the file."""
HEADER = (
    "# Keys of Penstock's clients, one a line; `penstock keys` changes them. Servers read this "
    "file again when it changes."
)


class KeyFileError(ValueError):
    """The file is no file of keys, or cannot be used. The message says why and repeats no key."""


class Line(NamedTuple):
    """A line as it stands in the file, and the key that it holds; ``None``: it is a comment."""

    text: str
    record: KeyRecord | None = None


def read_keys(path: Path) -> list[KeyRecord]:
    """The keys of a file that nobody else can read. Raises ``KeyFileError``."""
    try:
        kind = path.stat().st_mode
    except FileNotFoundError:
        raise KeyFileError(
            f"{path} is not there; `penstock keys add NAME --keys-file {path}` makes it"
        ) from None
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror or error}") from None
    if not stat.S_ISREG(kind):
        raise KeyFileError(f"{path} is no regular file")
    text = _text_of(path)
    if not text.strip():
        raise KeyFileError(f"{path} is empty; a file without keys has a comment (#) at least")
    return [line.record for line in lines_of(text, path) if line.record is not None]


def lines_of(text: str, path: Path) -> list[Line]:
    """Every line with what it holds. Raises ``KeyFileError``."""
    found: list[Line] = []
    names: dict[str, int] = {}
    ids: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            found.append(Line(line))
            continue
        record = _record_of(line, f"{path}, line {number}")
        for what, seen, value in (("name", names, record.name), ("id", ids, record.id)):
            if (first := seen.setdefault(value, number)) != number:
                raise KeyFileError(
                    f"{path}, line {number}: the {what} {value} stands in line {first} already"
                )
        found.append(Line(line, record))
    if len(names) > MAX_KEYS:
        raise KeyFileError(f"{path} holds {len(names)} keys; there may be {MAX_KEYS}")
    return found


def _record_of(line: str, where: str) -> KeyRecord:
    if len(line) > MAX_LINE:
        raise KeyFileError(f"{where}: {len(line)} characters; a line has {MAX_LINE} at most")
    try:
        return msgspec.json.decode(line, type=KeyRecord)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise KeyFileError(f"{where}: {error}") from None


def change_keys(path: Path, change: Callable[[list[Line]], list[Line]]) -> None:
    """Put what ``change`` makes of the lines in their place, all at once. A file that is not there
    is made, with mode 0600. Raises ``KeyFileError``, and what ``change`` raises.
    """
    path = Path(os.path.realpath(path))
    try:
        with _locked(path):
            text = _text_of(path)
            lines = change(lines_of(text, path) if text.strip() else [Line(HEADER)])
            _replace(path, "".join(f"{line.text}\n" for line in lines))
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror or error}") from None


def line_of(record: KeyRecord) -> Line:
    """As it is written."""
    return Line(msgspec.json.encode(record).decode(), record)


def _text_of(path: Path) -> str:
    try:
        return read_private_text(path)
    except PrivateFileError as error:
        raise KeyFileError(str(error)) from None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Nobody else changes the file. Who waited for it may hold the old one's lock: again then."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(descriptor, path)
            if _is_at(descriptor, path):
                yield
                return
        finally:
            os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    """Raises ``KeyFileError`` where another process keeps it."""
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise KeyFileError(
                    f"{path}: another process has held the file's lock for {LOCK_S:g} s"
                ) from None
        time.sleep(0.02)


def _is_at(descriptor: int, path: Path) -> bool:
    mine = os.fstat(descriptor)
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


def _keep_owner(descriptor: int, path: Path) -> None:
    """The new file belongs to whom the old one does: a server of that user goes on reading it."""
    there, mine = os.stat(path), os.fstat(descriptor)
    if (there.st_uid, there.st_gid) != (mine.st_uid, mine.st_gid):
        os.fchown(descriptor, there.st_uid, there.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(there.st_mode))


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            _keep_owner(descriptor, path)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
