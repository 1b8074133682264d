"""A file of keys for a test's server, with the keys that it holds no more than the hashes of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.keys.key_file import Line, change_keys, line_of
from penstock.protocol.keys.record import KeyLimits, Role, new_key


class Keys:
    """Made empty; ``config`` makes a server that reads it."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.path = folder / "keys"
        self.config = ServerConfig(keys_file=str(self.path), api_key=["of-the-flag"], **config)
        change_keys(self.path, lambda lines: lines)

    def add(self, name: str, role: Role = "user", **more: Any) -> dict[str, str]:
        """The headers with a new key."""
        return {"Authorization": f"Bearer {self.key(name, role, **more)}"}

    def key(self, name: str, role: Role = "user", **more: Any) -> str:
        """more: of ``new_key``, or limits."""
        limits = {one: more.pop(one) for one in KeyLimits.__struct_fields__ if one in more}
        key, record = new_key(name, role, limits=KeyLimits(**limits), **more)
        change_keys(self.path, lambda lines: [*lines, line_of(record)])
        return key

    def change(self, change: Callable[[list[Line]], list[Line]]) -> None:
        change_keys(self.path, change)
