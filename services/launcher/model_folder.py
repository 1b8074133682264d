"""Which folders administrators may load models from: those below ``--model-dirs``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

MAX_ENTRIES = 10_000
"""Files and folders of one model, at most."""


class FolderRefused(ValueError):
    """The folder may not be loaded. ``status`` is that of the HTTP answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def find_folder(asked: str, dirs: Sequence[str], flag: str = "--model-dirs") -> Path:
    """The folder that is asked for, without links: absolute, or relative to the first of ``dirs``
    that has it.

    flag: by which ``dirs`` were given. It must lie below one of ``dirs``, and so must all that
    links in it lead to. Raises ``FolderRefused``.
    """
    roots = [Path(os.path.realpath(os.path.expanduser(one))) for one in dirs]
    try:
        places = [Path(os.path.realpath(root / asked)) for root in roots]  # absolute: all the same
        within = [one for one in places if _is_below(one, roots)]
        found = next((one for one in within if one.is_dir()), None)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise FolderRefused(400, f"the folder cannot be looked at: {error}") from None
    named = " ".join(dirs)
    if not within:
        raise FolderRefused(403, f"the folder is not below {flag} {named}")
    if found is None:
        raise FolderRefused(404, f"there is no such folder below {flag} {named}")
    for link in _links(found):
        if not _is_below(Path(os.path.realpath(link)), roots):
            name = link.relative_to(found)
            raise FolderRefused(403, f"its {name} is a link out of {flag} {named}")
    return found


def _is_below(place: Path, roots: Sequence[Path]) -> bool:
    return any(place != root and place.is_relative_to(root) for root in roots)


def _links(folder: Path) -> Iterator[Path]:
    """Links among the files of a folder and of those below it. Raises ``FolderRefused``."""
    count = 0
    for place, folders, files in os.walk(folder):  # follows no link
        count += len(folders) + len(files)
        if count > MAX_ENTRIES:
            raise FolderRefused(400, f"the folder holds more than {MAX_ENTRIES:,} files")
        for name in (*folders, *files):
            path = Path(place, name)
            if path.is_symlink():
                yield path
