"""What ``--api-key`` means: keys, and files of keys."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from penstock.protocol.config.sources import ConfigError
from penstock.protocol.private_file import PrivateFileError, read_private_text

FILE = "file:"
MAX_KEYS = 1024
"""In all. Each request is compared with every key."""
_COMMENT = re.compile(r"(^|\s)#.*")


def read_api_keys(values: Sequence[str]) -> list[str]:
    """The keys that the values of ``--api-key`` stand for: a key itself, or ``file:PATH``.

    A file holds one key a line; empty lines and what follows a ``#`` at a line's beginning or
    after a blank are left out. Raises ``ConfigError``, in which no key is repeated.
    """
    keys: list[str] = []
    for value in values:
        keys += _keys_of_file(value) if value.startswith(FILE) else [value]
    if "" in keys:
        raise ConfigError("--api-key: a key is empty")
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"--api-key: {len(keys)} keys are given; there may be {MAX_KEYS}")
    return keys


def _keys_of_file(value: str) -> list[str]:
    name = value.removeprefix(FILE)
    if not name:
        raise ConfigError(f"--api-key {value}: the path is missing; expected file:PATH")
    path = Path(name)
    if os.path.exists(path) and not path.is_file():  # it is read more than once, so it is no pipe
        raise ConfigError(f"--api-key {value}: {path} is no regular file")
    try:
        lines = read_private_text(path).splitlines()
    except PrivateFileError as error:
        raise ConfigError(f"--api-key {value}: {error}") from None
    keys = []
    for number, line in enumerate(lines, 1):
        words = _COMMENT.sub("", line).split()
        if len(words) > 1:
            raise ConfigError(
                f"--api-key {value}: line {number} holds {len(words)} words; write one key a line, "
                "without blanks in it, and a # before a comment"
            )
        keys += words
    if not keys:
        raise ConfigError(f"--api-key {value}: the file holds no key; write one a line")
    return keys
