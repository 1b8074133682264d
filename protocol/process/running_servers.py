"""The servers of this user on this host: each launcher leaves a record of itself in its folder, and
in the user's folder for sockets if its own lies elsewhere."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

PREFIX = "penstock-serve-"
SERVER_FOLDERS = f"{PREFIX}*"
"""The pattern of all servers' folders in ``runtime_root``."""
RECORD = "launcher.json"
FOLDER_VARIABLE = "PENSTOCK_RUNTIME_DIR"
"""``--runtime-dir`` of a server; for a command that names none, the folder of the one it means."""


def runtime_root(environment: Mapping[str, str]) -> Path:
    """The user's folder for sockets: ``XDG_RUNTIME_DIR``, else the folder for temporary files."""
    named = environment.get("XDG_RUNTIME_DIR", "")
    if named and os.path.isdir(named) and os.stat(named).st_uid == os.getuid():
        return Path(named)
    return Path(tempfile.gettempdir())


class ServerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a launcher says of its server to commands of the same user."""

    pid: int
    started_ticks: int
    """When the process started, in the kernel's ticks since boot: a later process may get its
    number, but not both."""
    router: str
    drain_timeout_s: float
    models: list[str]
    folders: list[str]
    """Of the models, in their order, as absolute paths without links."""
    url: str = ""
    """Empty until it is ready."""
    runtime_dir: str = ""
    """Of the server, where the record lies in another folder."""


class RunningServer(msgspec.Struct, frozen=True):
    """A record whose launcher lives."""

    folder: str
    """In which its processes' sockets are."""
    record: ServerRecord

    def uptime_s(self) -> float:
        """Since the launcher was started."""
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        return since_boot - self.record.started_ticks / os.sysconf("SC_CLK_TCK")

    def open_process(self) -> int | None:
        """A descriptor of the launcher's process (pidfd), through which no other can be meant;
        ``None``: it has ended."""
        try:
            descriptor = os.pidfd_open(self.record.pid)
        except OSError:
            return None
        if started_ticks(self.record.pid) != self.record.started_ticks:
            os.close(descriptor)
            return None
        return descriptor


def started_ticks(pid: int) -> int:
    """When a process started (field 22 of ``/proc/PID/stat``, proc(5)); 0: there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


class Registration:
    """The record of the launcher that this process is, for as long as it serves."""

    def __init__(
        self,
        folder: Path,
        router: str,
        drain_timeout_s: float,
        models: Sequence[tuple[str, str]],
        listed: Path | None = None,
    ) -> None:
        """``models``: name and folder of each. ``listed``: a folder in the user's folder for
        sockets that holds the record as well, where ``folder`` is none."""
        self._path = folder / RECORD
        self._listed = None if listed is None else listed / RECORD
        self._record = ServerRecord(
            pid=os.getpid(),
            started_ticks=started_ticks(os.getpid()),
            router=router,
            drain_timeout_s=drain_timeout_s,
            models=[name for name, _ in models],
            folders=[os.path.realpath(place) for _, place in models],
        )
        self._write()

    def serve(self, models: Sequence[tuple[str, str]]) -> None:
        """These are the models now: name and folder of each."""
        self._record = msgspec.structs.replace(
            self._record,
            models=[name for name, _ in models],
            folders=[os.path.realpath(place) for _, place in models],
        )
        self._write()

    def ready(self, url: str) -> None:
        self._record = msgspec.structs.replace(self._record, url=url)
        self._write()

    def remove(self) -> None:
        for path in filter(None, (self._path, self._listed)):
            path.unlink(missing_ok=True)

    def _write(self) -> None:
        _write(self._path, self._record)
        if self._listed is not None:
            named = str(self._path.parent)
            _write(self._listed, msgspec.structs.replace(self._record, runtime_dir=named))


def _write(path: Path, record: ServerRecord) -> None:
    """Whole or not at all. A full disk is no reason not to serve."""
    partial = path.with_suffix(".new")
    with contextlib.suppress(OSError):
        partial.write_bytes(msgspec.json.encode(record))
        partial.replace(path)


def running_servers(environment: Mapping[str, str], folder: str = "") -> list[RunningServer]:
    """Those whose launcher lives, the oldest first. ``folder``: of one server, its
    ``--runtime-dir``; else all in the user's folder for sockets are looked at, and the folder that
    ``FOLDER_VARIABLE`` names. Where there is no folder that could be it, there is no server."""
    folders = [Path(folder)] if folder else _server_folders(environment)
    # One may be found by both of its records, and its folder under several names.
    found = {
        (server.record.pid, os.path.realpath(server.folder)): server
        for place in folders
        for server in _living(place)
    }
    return sorted(found.values(), key=lambda one: (one.record.started_ticks, one.folder))


def _server_folders(environment: Mapping[str, str]) -> list[Path]:
    named = environment.get(FOLDER_VARIABLE, "")
    folders = [Path(named).absolute()] if named else []
    with contextlib.suppress(OSError):  # none for temporary files can be used, as on a full disk
        folders += runtime_root(environment).glob(SERVER_FOLDERS)
    return folders


def _living(folder: Path) -> Iterator[RunningServer]:
    path = folder / RECORD
    try:
        # Neither the folder nor the record may be one that somebody else has put there.
        if {folder.lstat().st_uid, path.lstat().st_uid} != {os.getuid()}:
            return
        record = msgspec.json.decode(path.read_bytes(), type=ServerRecord)
    except (OSError, msgspec.DecodeError):
        return
    if started_ticks(record.pid) == record.started_ticks:
        yield RunningServer(record.runtime_dir or str(folder), record)
