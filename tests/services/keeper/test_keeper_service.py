"""The keeper's process: whom it answers when, and which folders it takes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.protocol.config import Config
from penstock.protocol.config.fields import ClusterConfig
from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.kv_slots import HEADER_BYTES, seal, slot_bytes
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.kv_tier import (
    TierGet,
    TierGot,
    TierKeys,
    TierOpen,
    TierOpened,
)
from penstock.protocol.wire.messages.membership import Capacity, Identity, Peer, Phase
from penstock.protocol.wire.security import SecurityError
from penstock.services.keeper.disk_tier import DiskTier
from penstock.services.keeper.service import KeeperService
from penstock.services.keeper.space import Space
from penstock.services.keeper.tier import BlockName

SPACE, KEY = b"s" * 16, b"k" * 16
SLOT = slot_bytes(1000)


def config_of(**cache: Any) -> Config:
    config = Config()
    return msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, **cache))


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701])
def test_a_folder_that_others_may_enter_is_refused_by_the_flag_that_names_it(
    tmp_path: Path, mode: int
) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(SecurityError, match=f"--kv-tier-disk: others may enter {folder}; chmod"):
        KeeperService(config_of(kv_tier_disk=str(folder)))


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("")
    with pytest.raises(SecurityError, match="choose another --kv-tier-disk"):
        KeeperService(config_of(kv_tier_disk=str(tmp_path / "kv")))


class Told:
    """A keeper that lives in the test, and what it says to schedulers."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, models: Sequence[str] = ()
    ) -> None:
        self.said: list[Message] = []
        self.scans: list[Any] = []
        config = config_of(kv_tier_disk=str(folder), kv_tier_memory_bytes=100 * SLOT)
        cluster = ClusterConfig(router=f"ipc://{folder.parent}/router.sock")
        server = ServerConfig(expected_models=list(models))
        config = msgspec.structs.replace(config, cluster=cluster, server=server)
        self.keeper = KeeperService(config)
        monkeypatch.setattr(self.keeper.mailbox, "send", self._send)
        monkeypatch.setattr(self.keeper._threads, "first", self.scans.append)
        self.keeper.start()

    def _send(self, address: str, message: Message) -> bool:
        self.said.append(message)
        return True


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o700)
    content = memoryview(bytearray(SLOT))
    seal(content, SPACE, KEY, SLOT - HEADER_BYTES)
    DiskTier(folder, 1 << 20).put(BlockName(SPACE, KEY), content)
    told = Told(folder, monkeypatch)
    yield told
    told.keeper.mailbox.close()


@pytest.mark.parametrize("asked", ["before the scan is over", "behind it"])
def test_who_opens_a_space_hears_of_all_keys_before_it_may_ask(told: Told, asked: str) -> None:
    keeper, opening = told.keeper, TierOpen(SPACE, SLOT, 4, "S")
    if asked == "before the scan is over":
        for _ in range(2):
            keeper.on_message(1, opening, 0.0)
        keeper.work(0.0)
        assert told.said == []
    assert keeper.status.phase == Phase.LOADING
    told.scans[0]()
    keeper.work(0.0)
    assert keeper.status.phase == Phase.READY
    if asked == "behind it":
        keeper.on_message(1, opening, 0.0)
    keys, opened = told.said
    assert isinstance(keys, TierKeys)
    assert keys.added == KEY
    assert isinstance(opened, TierOpened)
    assert not opened.refused


def test_blocks_that_the_disk_was_too_slow_for_are_counted(told: Told) -> None:
    told.scans[0]()
    told.keeper.on_message(1, TierOpen(SPACE, SLOT, 4, "S"), 0.0)
    told.keeper._spaces[SPACE].skipped_writes = 3
    told.keeper._skipped_writes = 4
    told.keeper.on_tick(0.0)
    assert told.keeper.metrics.counter("kv_tier_skipped_writes_total").value == 7


def test_a_scheduler_that_was_taken_for_gone_is_told_to_open_anew(told: Told) -> None:
    told.scans[0]()
    told.keeper.on_message(1, TierGet(3, KEY, "S"), 0.0)
    assert told.said == [TierOpened(b"", "", 0, [])]


def test_spaces_that_no_engine_has_any_more_give_their_memory_back(told: Told) -> None:
    told.scans[0]()
    paths = []
    for number in range(4):
        told.keeper.on_message(1, TierOpen(bytes([number]) * 16, SLOT, 4, "S"), 0.0)
        opened = told.said[-1]
        assert isinstance(opened, TierOpened)
        paths.append(Path(opened.pool.split()[0]))
    assert len(told.keeper._spaces) == 2
    assert [path.exists() for path in paths[-2:]] == [True, True]


def test_models_that_take_turns_find_their_blocks_and_what_was_used_least_lately_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kv").mkdir(mode=0o700)
    told = Told(tmp_path / "kv", monkeypatch, models=["a", "b", "c"])
    told.scans[0]()
    keeper = told.keeper

    def turn(name: bytes) -> Space:
        """An engine of a model starts, and ends when it is to sleep."""
        address = f"{name!r} {len(told.said)}"
        keeper.on_message(1, TierOpen(name * 16, SLOT, 4, address), 0.0)
        gone = Peer("scheduler", address, 1, Identity(1, "host"), Phase.READY, "", Capacity(), 0)
        keeper.on_gone({1: gone}, 0.0)
        return keeper._spaces[name * 16]

    first = [turn(name) for name in (b"a", b"b", b"c")]
    assert [turn(name) for name in (b"a", b"b", b"c", b"b", b"a")] == [*first, first[1], first[0]]
    turn(b"d")
    assert set(keeper._spaces) == {name * 16 for name in (b"a", b"b", b"d")}
    keeper.mailbox.close()


def test_what_the_disk_did_for_a_space_that_is_gone_changes_no_other(told: Told) -> None:
    told.scans[0]()
    keeper = told.keeper
    keeper.on_message(1, TierOpen(SPACE, SLOT, 4, "S"), 0.0)
    old = keeper._spaces.pop(SPACE)
    keeper.on_message(1, TierOpen(SPACE, SLOT, 4, "T"), 0.0)
    new = keeper._spaces[SPACE]
    old.get("S", 1, [KEY])
    old.pool.close()
    assert keeper._threads is not None
    guard = time.monotonic() + 60
    while keeper._threads.reading and time.monotonic() < guard:
        keeper.work(0.0)
        time.sleep(0.001)
    assert new.pool.num_blocks == 0
    assert old.pool.num_blocks == 1


def served(told: Told, until: Any) -> None:
    """The keeper goes on until that is so."""
    deadline = time.monotonic() + 30
    while not until():
        assert time.monotonic() < deadline
        told.keeper.work(0.0)
        time.sleep(0.001)


def kept_on_disk(folder: Path, space: bytes, keys: Sequence[bytes], size: int = SLOT) -> None:
    for key in keys:
        content = memoryview(bytearray(size))
        seal(content, space, key, 1000)
        DiskTier(folder, 1 << 20).put(BlockName(space, key), content)


def test_what_was_used_last_is_in_memory_before_an_engine_asks(told: Told, tmp_path: Path) -> None:
    others = [bytes([number]) * 16 for number in range(90)]
    kept_on_disk(tmp_path / "kv", SPACE, others)
    told.scans[0]()
    told.keeper.work(0.0)
    pool = told.keeper._spaces[SPACE].pool
    served(told, lambda: pool.num_blocks == 75)
    assert told.keeper._threads is not None and not told.keeper._threads.reading
    assert set(pool.keys()) == set(others[-75:]), "there is room for others"
    told.keeper.on_message(1, TierOpen(SPACE, SLOT, 4, "S"), 0.0)
    told.keeper.on_message(1, TierGet(1, others[-1] + KEY, "S"), 0.0)
    served(told, lambda: any(isinstance(one, TierGot) for one in told.said))
    (got,) = (one for one in told.said if isinstance(one, TierGot))
    assert len(got.slots) == 2, "the rest is read when it is wanted"


def test_a_space_that_was_made_by_damaged_files_is_made_again(told: Told, tmp_path: Path) -> None:
    kept_on_disk(tmp_path / "kv", SPACE, [b"a" * 16, b"b" * 16], slot_bytes(5000))
    told.scans[0]()
    told.keeper.work(0.0)
    assert told.keeper._spaces[SPACE].pool.slot_bytes == slot_bytes(5000)
    told.keeper.on_message(1, TierOpen(SPACE, SLOT, 4, "S"), 0.0)
    assert told.keeper._spaces[SPACE].pool.slot_bytes == SLOT
    opened = told.said[-1]
    assert isinstance(opened, TierOpened) and not opened.refused
