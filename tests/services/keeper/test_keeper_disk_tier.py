"""Blocks on disk: found again, and never taken for what they are not."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

import pytest

from penstock.protocol.kv_slots import HEADER_BYTES, seal, slot_bytes
from penstock.services.keeper import disk_tier
from penstock.services.keeper.disk_tier import DiskTier
from penstock.services.keeper.tier import BlockName

SPACE, OTHER = b"s" * 16, b"o" * 16
BLOCK_BYTES = 1000
SLOT = slot_bytes(BLOCK_BYTES)


def name(number: int, space: bytes = SPACE) -> BlockName:
    return BlockName(space, bytes([number]) * 16)


def block(of: BlockName) -> memoryview:
    content = bytearray(SLOT)
    content[HEADER_BYTES : HEADER_BYTES + BLOCK_BYTES] = os.urandom(BLOCK_BYTES)
    view = memoryview(content)
    seal(view, of.space, of.key, BLOCK_BYTES)
    return view


def file_of(folder: Path, of: BlockName) -> Path:
    return folder / of.space.hex() / of.key.hex()[:2] / f"{of.key.hex()}.kv"


def test_a_block_is_found_again_by_the_next_keeper(tmp_path: Path) -> None:
    first, content = DiskTier(tmp_path, 1 << 20), block(name(1))
    assert first.put(name(1), content)
    second, into = DiskTier(tmp_path, 1 << 20), memoryview(bytearray(SLOT))
    assert not second.has(name(1))
    second.scan()
    assert second.keys(SPACE) == [name(1).key]
    assert second.used == SLOT
    assert second.get(name(1), into)
    assert into == content
    assert not second.has(name(1, OTHER))


def test_nobody_else_can_read_a_file(tmp_path: Path) -> None:
    DiskTier(tmp_path, 1 << 20).put(name(1), block(name(1)))
    path = file_of(tmp_path, name(1))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("damage", ["torn", "flipped", "foreign", "empty", "longer", "link"])
def test_a_file_that_is_not_what_its_name_says_is_removed(tmp_path: Path, damage: str) -> None:
    tier = DiskTier(tmp_path, 1 << 20)
    tier.put(name(1), block(name(1)))
    path = file_of(tmp_path, name(1))
    content = bytearray(path.read_bytes())
    if damage == "torn":
        path.write_bytes(content[: SLOT // 2])
    elif damage == "flipped":
        content[HEADER_BYTES + 500] ^= 1
        path.write_bytes(content)
    elif damage == "foreign":
        path.write_bytes(block(name(1, OTHER)))
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "longer":
        path.write_bytes(content + b"more")
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    assert not tier.get(name(1), memoryview(bytearray(SLOT)))
    assert not tier.has(name(1))
    assert tier.used == 0
    assert tier.take_gone() == [name(1)]
    if damage != "link":
        assert tier.corrupted == 1
        assert not path.exists()


def test_the_blocks_used_least_lately_go_first(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 3 * SLOT)
    for number in range(3):
        tier.put(name(number), block(name(number)))
    assert tier.get(name(0), memoryview(bytearray(SLOT)))
    tier.put(name(3), block(name(3)))
    assert tier.take_gone() == [name(1)]
    assert tier.used == 3 * SLOT
    os.utime(file_of(tmp_path, name(2)), (1, 1))
    again = DiskTier(tmp_path, 2 * SLOT)
    again.scan()
    assert again.take_gone() == [name(2)]


def test_half_written_files_go_when_their_writers_are_dead_and_others_stay(tmp_path: Path) -> None:
    DiskTier(tmp_path, 1 << 20).put(name(1), block(name(1)))
    folder = file_of(tmp_path, name(1)).parent
    dead, living = folder / "a.1.1.part", folder / "b.2.1.part"
    dead.write_bytes(b"half")
    living.write_bytes(b"half")
    (folder / "notes.txt").write_text("not ours")
    with living.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        tier = DiskTier(tmp_path, 1 << 20)
        tier.scan()
        assert living.exists()
    assert not dead.exists()
    assert (folder / "notes.txt").exists()
    assert tier.foreign == 1
    assert tier.keys(SPACE) == [name(1).key]


def test_a_disk_that_takes_nothing_costs_the_block_alone(tmp_path: Path) -> None:
    (tmp_path / SPACE.hex()).write_text("a file where a folder is to be")
    tier = DiskTier(tmp_path, 1 << 20)
    assert not tier.put(name(1), block(name(1)))
    assert tier.failed_writes == 1
    assert not tier.get(name(1), memoryview(bytearray(SLOT)))


def test_a_pipe_in_place_of_a_file_keeps_nobody_waiting(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 1 << 20)
    tier.put(name(1), block(name(1)))
    path = file_of(tmp_path, name(1))
    path.unlink()
    os.mkfifo(path)
    os.mkfifo(path.with_name("a.1.1.part"))
    assert not tier.get(name(1), memoryview(bytearray(SLOT)))
    tier.scan()


def test_a_folder_of_a_space_is_for_its_user_alone(tmp_path: Path) -> None:
    DiskTier(tmp_path, 1 << 20).put(name(1), block(name(1)))
    assert stat.S_IMODE((tmp_path / SPACE.hex()).stat().st_mode) == 0o700


def test_a_block_that_is_written_while_a_scan_finds_it_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DiskTier(tmp_path, 1 << 20).put(name(1), block(name(1)))
    tier = DiskTier(tmp_path, 1 << 20)
    write = disk_tier._write

    def scan_between(part: Path, content: memoryview, path: Path) -> None:
        write(part, content, path)
        tier.scan()

    monkeypatch.setattr(disk_tier, "_write", scan_between)
    assert tier.put(name(1), block(name(1)))
    assert tier.used == SLOT


def test_a_scan_goes_on_behind_a_file_that_vanishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path, 1 << 20)
    for number in (1, 2):
        tier.put(name(number), block(name(number)))
    listed = disk_tier._listed

    def listed_late(path: Path | str) -> list[os.DirEntry[str]]:
        entries = listed(path)
        file_of(tmp_path, name(1)).unlink(missing_ok=True)
        return entries

    monkeypatch.setattr(disk_tier, "_listed", listed_late)
    again = DiskTier(tmp_path, 1 << 20)
    again.scan()
    assert again.keys(SPACE) == [name(2).key]
