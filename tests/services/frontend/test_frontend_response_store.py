"""Where responses are kept, and what makes room for others."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.protocol.config import ConfigError
from penstock.services.frontend.dialects.responses.chosen_store import make_store
from penstock.services.frontend.dialects.responses.store import (
    DirectoryStore,
    MemoryStore,
    StoredResponse,
)


def stored(size: int) -> StoredResponse:
    return StoredResponse(b"r" * size, b"[]")


def named(number: int) -> str:
    return f"resp_{number:032x}"


def test_a_memory_forgets_what_was_used_longest_ago() -> None:
    memory = MemoryStore(10_000)
    for number in range(4):
        assert memory.keep("me", named(number), stored(1500))
    assert memory.find("me", named(0)) and memory.find("you", named(0)) is None
    assert memory.keep("me", named(4), stored(1500))
    assert memory.find("me", named(1)) is None
    assert memory.find("me", named(0)) is not None
    assert not memory.keep("me", named(5), stored(20_000))
    assert memory.used <= 10_000
    for number in (0, 2, 3, 4):
        assert memory.drop("me", named(number))
    assert (memory.used, len(memory)) == (0, 0)
    few = MemoryStore(10_000, max_number=2)
    assert [few.keep("me", named(number), stored(1)) for number in range(3)] == [True] * 3
    assert len(few) == 2 and few.find("me", named(0)) is None


def test_who_holds_the_most_makes_room_and_nobody_else_loses_anything() -> None:
    memory = MemoryStore(10_000)
    assert memory.keep("you", named(0), stored(1500))
    for number in range(1, 20):
        assert memory.keep("me", named(number), stored(1500))
    assert memory.find("you", named(0)) is not None
    assert memory.find("me", named(19)) is not None and memory.find("me", named(1)) is None
    assert memory.used <= 10_000


def with_folder(
    folder: Path, use: Callable[[DirectoryStore], Awaitable[None]], **limits: Any
) -> None:
    async def main() -> None:
        await use(DirectoryStore(folder, **{"max_bytes": 100_000, **limits}))

    asyncio.run(main())


def test_a_folder_is_private_and_its_files_are_whole_or_not_there(tmp_path: Path) -> None:
    folder = tmp_path / "kept"

    async def use(store: DirectoryStore) -> None:
        assert await store.put("me", named(1), stored(10))
        assert await store.get("me", named(1)) == stored(10)
        assert await store.get("you", named(1)) is None
        (file,) = folder.glob("*/*")
        assert file.stat().st_mode & 0o777 == 0o600
        assert folder.stat().st_mode & 0o777 == file.parent.stat().st_mode & 0o777 == 0o700
        for name in ("../x", "resp_x", named(2), f"{named(1)}\n"):
            assert await store.get("me", name) is None
            assert not await store.delete("me", name)
        assert not await store.put("me", "../x", stored(1))
        file.write_bytes(file.read_bytes()[:-3])
        assert await store.get("me", named(1)) is None and not file.exists()
        (tmp_path / "secret").write_bytes(msgspec.msgpack.encode(stored(1)))
        file.symlink_to(tmp_path / "secret")
        assert await store.get("me", named(1)) is None
        assert await store.put("me", named(1), stored(2)) and not file.is_symlink()
        assert await store.delete("me", named(1)) and not await store.delete("me", named(1))

    with_folder(folder, use)


def test_a_full_folder_makes_room(tmp_path: Path) -> None:
    async def use(store: DirectoryStore) -> None:
        for number in range(10):
            assert await store.put("me", named(number), stored(1000))
            (file,) = tmp_path.glob(f"*/{named(number)}*")
            os.utime(file, (number, number))
        kept = sorted(file.name for file in tmp_path.glob("*/*"))
        assert len(kept) <= 5 and kept[-1].startswith(named(9))
        assert not await store.put("me", named(11), stored(6000))

    tmp_path.chmod(0o700)
    with_folder(tmp_path, use, max_bytes=5500)


def test_a_full_folder_makes_room_at_the_cost_of_who_holds_the_most(tmp_path: Path) -> None:
    async def use(store: DirectoryStore) -> None:
        assert await store.put("you", named(0), stored(1000))
        for number in range(1, 20):
            assert await store.put("me", named(number), stored(1000))
        assert await store.get("you", named(0)) is not None
        assert await store.get("me", named(19)) is not None

    tmp_path.chmod(0o700)
    with_folder(tmp_path, use, max_bytes=5500)


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        make_store(str(tmp_path), 1)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--response-store"):
        make_store(str(tmp_path / "file"), 1)
