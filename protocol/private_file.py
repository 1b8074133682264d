"""Files that hold a secret: read only where nobody else can."""

from __future__ import annotations

import os
import stat
from pathlib import Path


class PrivateFileError(ValueError):
    """Others can read or write the file, or it cannot be read. The message names the remedy."""


def read_private_text(path: Path) -> str:
    """The text of a file of this user's own that only this user can read.

    What another user owns (a secret that a container's platform mounts, for example) is taken
    whoever that user lets read it. What others may write is refused. Raises ``PrivateFileError``.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            status = os.fstat(file.fileno())
            if status.st_mode & (stat.S_IRGRP | stat.S_IROTH) and status.st_uid == os.getuid():
                raise PrivateFileError(f"others can read {path}; chmod 600 {path}")
            if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise PrivateFileError(f"others can write {path}; chmod go-w {path}")
            return file.read()
    except OSError as error:
        raise PrivateFileError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise PrivateFileError(f"{path}: not text in UTF-8") from None
