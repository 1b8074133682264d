"""The keys of a file as they are now: the file is looked at again every second."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from penstock.protocol.keys.key_file import KeyFileError, read_keys
from penstock.protocol.keys.record import KeyRecord, id_of, new_key
from penstock.protocol.process import logs
from penstock.services.frontend.keys.known_key import KnownKey, key_of_record

LOOK_SECONDS = 1.0

_log = logging.getLogger("penstock.frontend")


class Refused(Exception):
    """A key that is known is not valid (any more); the message says why."""


class KeyTable:
    """Records by the public ids of their keys."""

    def __init__(self, path: Path, look_s: float = LOOK_SECONDS) -> None:
        """Raises ``KeyFileError``."""
        self._path = path
        self._look_s = look_s
        self._seen = _stamp(path)
        self._complaint = ""
        _, self._nobody = new_key("nobody")
        self._take(read_keys(path))
        self._watching: asyncio.Task[None] | None = None

    def _take(self, records: Iterable[KeyRecord]) -> None:
        self._found = {record.id: (record, key_of_record(record)) for record in records}

    def find(self, given: str) -> KnownKey | None:
        """Whose key it is; ``None``: it is none of these. One hash is computed, whether the id is
        known or not. Raises ``Refused``."""
        if not (public := id_of(given)):
            return None
        record, key = self._found.get(public, (self._nobody, None))
        if not record.is_of(given) or key is None:
            return None
        _check(record)
        return key

    def current(self, key: KnownKey) -> KnownKey:
        """What a key that was let in may do now. Raises ``Refused``."""
        record, found = self._found.get(key.id, (None, None))
        if record is None or found is None:
            raise Refused(f"The API key {key.name} was removed")
        _check(record)
        return found

    # --- changes of the file

    def begin(self) -> None:
        """Look after the file from now on."""
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def end(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            try:
                await self.look()
            except Exception as error:  # none is known, and no key may depend on that
                self._complain(f"{self._path}: {type(error).__name__}: {error}")

    async def look(self) -> None:
        """Take the file's keys if it has changed. What cannot be read changes nothing: the old
        keys stay, and the log says why, once."""
        stamp = _stamp(self._path)
        if stamp == self._seen:
            return
        try:
            records = await asyncio.to_thread(read_keys, self._path)
        except KeyFileError as error:
            self._seen = stamp
            self._complain(str(error))
            return
        self._seen, self._complaint = stamp, ""
        self._take(records)
        logs.record("info", "keys read again", {"file": str(self._path), "keys": len(records)})

    def _complain(self, why: str) -> None:
        """Once, until it is another reason."""
        if why != self._complaint:
            self._complaint = why
            _log.warning("the keys stay as they were: %s", why)


def _check(record: KeyRecord) -> None:
    if record.disabled:
        raise Refused(f"The API key {record.name} is disabled")
    if record.has_expired(datetime.now(UTC)):
        when = "" if record.expires is None else f"{record.expires.astimezone(UTC):%Y-%m-%d %H:%M}"
        raise Refused(f"The API key {record.name} expired on {when} UTC")


def _stamp(path: Path) -> tuple[int, ...]:
    """What changes with the file; empty where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )
