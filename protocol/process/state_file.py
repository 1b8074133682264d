"""The file in which a process says how it is, for probes that cannot ask it over a network."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from penstock.protocol.wire.addresses import AddressError

TOUCH_SECONDS = 1.0


class StateFile:
    """Holds the phase of the process, one word and a line's end. The main loop touches it once a
    second: a phase that is old is that of a process that hangs, was stopped or has ended.

    Without a path nothing is written.
    """

    def __init__(self, path: str, phase: str) -> None:
        """Writes it for the first time. Raises ``AddressError`` where that cannot be done."""
        self._path = Path(path) if path else None
        self._phase = ""
        self._told_at = 0.0
        if self._path is not None:
            try:
                self._write(self._path, phase)
            except OSError as error:
                raise AddressError(f"--state-file {path}: {error.strerror or error}") from None

    def tell(self, phase: str, now: float) -> None:
        """Write another phase, or touch the file where the last time is a second ago. ``now``:
        monotonic. A file that can no longer be written grows old, which is what it is for."""
        if self._path is None or (phase == self._phase and now - self._told_at < TOUCH_SECONDS):
            return
        self._told_at = now
        with contextlib.suppress(OSError):
            self._write(self._path, phase)

    def _write(self, path: Path, phase: str) -> None:
        """All at once: no reader sees half of a word."""
        new = path.with_name(f".{path.name}.{os.getpid()}")
        new.write_text(f"{phase}\n")
        new.replace(path)
        self._phase = phase

    def remove(self) -> None:
        """The process ends."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
