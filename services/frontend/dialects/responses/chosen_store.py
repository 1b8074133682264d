"""The store of responses that ``--response-store`` names."""

from __future__ import annotations

from pathlib import Path

from penstock.services.frontend.dialects.responses.store import (
    DirectoryStore,
    MemoryStore,
    ResponseStore,
)
from penstock.services.frontend.dialects.responses.valkey_store import ValkeyStore
from penstock.services.frontend.valkey_address import names_server, read_address


def make_store(where: str, max_bytes: int) -> ResponseStore | None:
    """``memory``, ``off``, a folder or a server; ``None``: nothing is kept. Raises
    ``ConfigError``."""
    if where == "off":
        return None
    if where == "memory":
        return MemoryStore(max_bytes)
    if names_server(where):
        return ValkeyStore(read_address(where), max_bytes)
    return DirectoryStore(Path(where).expanduser(), max_bytes)
