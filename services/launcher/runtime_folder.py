"""Where the ipc sockets of a server live: a folder that only its owner may enter."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from penstock.protocol.process.running_servers import (
    PREFIX,
    SERVER_FOLDERS,
    running_servers,
    runtime_root,
)
from penstock.protocol.wire.security import private_folder

_LOCK = "launcher.lock"
RESPONSES = "responses"
"""The folder in it in which several frontends keep responses."""


def default_router(environment: Mapping[str, str], runtime_dir: str = "") -> str:
    """The router's address for processes that are started by hand without ``--router``.

    One fixed address for a user, so that they find each other.
    """
    if runtime_dir:
        return f"ipc://{Path(runtime_dir).absolute()}/router.sock"
    root = runtime_root(environment)
    return f"ipc://{root}/penstock-{os.getuid()}/default/router.sock"


def make_default_folder(router: str) -> None:
    """Make the folders of ``default_router``'s address. Raises ``SecurityError``.

    The parent too must be private: whoever owns it could put another folder in our place.
    """
    folder = Path(router.removeprefix("ipc://")).parent
    private_folder(folder.parent)
    private_folder(folder)


def running_routers(environment: Mapping[str, str], runtime_dir: str = "") -> list[str]:
    """Addresses of this user's routers on this host; one may have ended without a word."""
    default = default_router(environment, runtime_dir)
    paths = [Path(default.removeprefix("ipc://"))]
    if not runtime_dir:
        paths += sorted(runtime_root(environment).glob(f"{SERVER_FOLDERS}/router.sock"))
        paths += [Path(server.folder) / "router.sock" for server in running_servers(environment)]
    own = os.getuid()
    sockets = [path for path in paths if path.exists() and path.stat().st_uid == own]
    return [f"ipc://{path}" for path in dict.fromkeys(sockets)]


@contextlib.contextmanager
def server_folder(environment: Mapping[str, str], runtime_dir: str = "") -> Iterator[Path]:
    """The folder of one server: ``runtime_dir``, else a new one that is removed at the end.

    Two servers of one user get two folders. Raises ``SecurityError`` when others may enter
    ``runtime_dir``.
    """
    if runtime_dir:
        named = private_folder(Path(runtime_dir).absolute())
        try:
            yield named
        finally:
            _remove_dead_sockets(named)
            shutil.rmtree(named / RESPONSES, ignore_errors=True)
        return
    with _new_folder(runtime_root(environment)) as folder:
        yield folder


@contextlib.contextmanager
def listed_folder(environment: Mapping[str, str], folder: Path) -> Iterator[Path | None]:
    """A folder where commands look for servers of this user, for the record of one whose own
    ``folder`` they would not find; removed at the end. ``None``: they find it, or none can be made
    (a server that has a folder of its own need not be able to write to the user's)."""
    with contextlib.ExitStack() as stack:
        listed = None
        with contextlib.suppress(OSError):
            root = runtime_root(environment)
            if folder.parent != root or not folder.match(SERVER_FOLDERS):
                listed = stack.enter_context(_new_folder(root))
        yield listed


@contextlib.contextmanager
def _new_folder(root: Path) -> Iterator[Path]:
    """One that is removed at the end, by the next launcher if this one is killed."""
    _remove_abandoned(root)
    # Locked before it gets the name that ``_remove_abandoned`` looks for.
    hidden = Path(tempfile.mkdtemp(prefix="." + PREFIX, dir=root))
    lock = _lock(hidden / _LOCK)
    folder = hidden.rename(root / hidden.name.removeprefix("."))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _lock(path: Path, *, create: bool = True) -> int | None:
    """Hold a lock file as long as the returned descriptor is open; ``None``: another holds it."""
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_abandoned(root: Path) -> None:
    """Remove the folders of launchers that were killed before they could do it."""
    for folder in root.glob(SERVER_FOLDERS):
        try:
            if folder.lstat().st_uid != os.getuid():
                continue
        except OSError:
            continue
        lock = _lock(folder / _LOCK, create=False)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _remove_dead_sockets(folder: Path) -> None:
    """Remove what killed processes left: each mailbox holds a lock beside its socket while it
    lives (see ``penstock.protocol.wire.mailbox``)."""
    for path in folder.glob("*.lock"):
        lock = _lock(path, create=False)
        if lock is not None:
            path.with_suffix(".sock").unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            os.close(lock)
