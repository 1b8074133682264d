"""What a server may leave behind on the machine: processes, sockets and folders, memory by name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil


@contextlib.contextmanager
def own_place() -> Iterator[Path]:
    """A folder for ``XDG_RUNTIME_DIR``: the sockets of every process of a server go there, and its
    name is in their environment."""
    folder = Path("/tmp") / f"chaos{os.getpid()}"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        folder.rmdir()


def orphans(place: Path) -> list[str]:
    """Processes that the server left behind: they have its place in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("XDG_RUNTIME_DIR") == str(place):
                found.append(" ".join(process.cmdline()))
    return found


def named_memory(pids: Iterable[int]) -> list[str]:
    """Shared memory with a name that these running processes map: it would outlive them."""
    return [
        line.rstrip()
        for pid in pids
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if "/dev/shm/" in line
    ]
