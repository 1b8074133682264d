"""How the ranks of a stage find out whether they can sum over peer memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.worker.ranks_in_threads import ThreadsMeeting

from penstock.kernels.gpu.all_reduce import GAVE_UP, STOP, PeerRows
from penstock.services.worker.gpu import one_shot
from penstock.services.worker.gpu.device_ranks import DeviceRanks, RankLost
from penstock.services.worker.gpu.one_shot import NoPeerMemory, OneShotSums, connect_one_shot
from penstock.services.worker.gpu.peer_memory import HANDLE_BYTES, PeerMemory, PeerMemoryError
from penstock.services.worker.gpu.row_linears import RowsLinear, over_peers
from penstock.services.worker.models.rank_shares import place_of

WIDTH = 64
ADDRESSES = {b"first": 4096, b"second": 8192}


class FakeMemory:
    """Memory of one of two ranks, at an address of its own for each who opens it."""

    made: list[bytes]

    def __init__(self, num_bytes: int, word: int) -> None:
        self._name = b"second" if self.made else b"first"
        self.made.append(self._name)
        self.address = ADDRESSES[self._name]

    def handle(self) -> bytes:
        return self._name

    def open(self, handle: bytes) -> int:
        return 16 * ADDRESSES[handle]


@pytest.fixture
def _fake_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeMemory, "made", [], raising=False)
    monkeypatch.setattr(one_shot, "PeerMemory", FakeMemory)
    monkeypatch.setattr(one_shot, "_try", lambda shared, device: None)


def both(rows: Callable[[int], torch.Tensor]) -> list[OneShotSums | str]:
    """What two ranks find with rows like those of each."""
    meeting = ThreadsMeeting()
    with ThreadPoolExecutor(2) as threads:
        asked = [
            threads.submit(connect_one_shot, meeting, place_of(rank, 2, 1), rows(rank))
            for rank in range(2)
        ]
        return [each.result(30) for each in asked]


def like(rank: int) -> torch.Tensor:
    return torch.zeros(1, WIDTH)


@pytest.mark.usefixtures("_fake_memory")
def test_each_rank_knows_its_own_memory_and_opens_the_others() -> None:
    found = both(like)
    shared = [each.shared for each in found if isinstance(each, OneShotSums)]
    assert [each.rank for each in shared] == [0, 1]
    own = [each.peers[each.rank] for each in shared]
    assert sorted(own) == sorted(ADDRESSES.values())
    assert shared[0].peers[1] == 16 * own[1]
    assert shared[1].peers[0] == 16 * own[0]
    assert {(each.width, each.dtype) for each in shared} == {(WIDTH, torch.float32)}


@pytest.mark.usefixtures("_fake_memory")
def test_no_rank_sums_over_peer_memory_where_one_of_them_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(self: FakeMemory, handle: bytes) -> int:
        if handle == b"first":
            raise PeerMemoryError("cuIpcOpenMemHandle_v2: peer access is not supported (217)")
        return 1

    monkeypatch.setattr(FakeMemory, "open", refuses)
    first, second = both(like)
    assert first == second
    assert isinstance(first, str)
    assert "peer access is not supported (217)" in first


@pytest.mark.usefixtures("_fake_memory")
def test_a_wrong_sum_at_the_start_leaves_all_sums_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(shared: PeerRows, device: torch.device) -> None:
        if shared.rank == 1:
            raise NoPeerMemory("a sum over it was wrong")

    monkeypatch.setattr(one_shot, "_try", wrong)
    assert both(like) == ["rank 1 of 2: a sum over it was wrong"] * 2


@pytest.mark.usefixtures("_fake_memory")
def test_ranks_on_several_hosts_share_no_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Boots:
        """A file that says something else to each who reads it."""

        said = iter("ab")

        def read_text(self) -> str:
            return next(self.said)

    monkeypatch.setattr(one_shot, "_BOOT", Boots())
    for found in both(like):
        assert isinstance(found, str)
        assert "the ranks are on several hosts" in found


@pytest.mark.usefixtures("_fake_memory")
def test_rows_of_another_type_go_by_nccl() -> None:
    for found in both(lambda rank: torch.zeros(1, WIDTH, dtype=torch.float64)):
        assert found == f"rank 0 of 2: it does not take rows of {WIDTH} torch.float64"


def sums_of(words: torch.Tensor) -> OneShotSums:
    turns = torch.zeros(4, dtype=torch.int32)
    shared = PeerRows(0, (1, 2), turns, words, 4, WIDTH, torch.float32, 1)
    return OneShotSums(shared, FakeMemory.__new__(FakeMemory))  # type: ignore[arg-type]


def test_a_step_whose_sum_has_given_up_fails() -> None:
    ranks, words = DeviceRanks(place_of(0, 2, 1), 100), torch.zeros(2, dtype=torch.int32)
    ranks._sums = sums_of(words)
    ranks.check()
    words[GAVE_UP] = 1
    with pytest.raises(RankLost, match="has not sent its part of a sum"):
        ranks.check()


def test_sums_that_wait_end_when_a_rank_is_lost() -> None:
    ranks, words = DeviceRanks(place_of(0, 2, 1), 100), torch.zeros(2, dtype=torch.int32)
    ranks._sums = sums_of(words)
    ranks.end("rank 1 is gone")
    assert words[STOP] == 1
    with pytest.raises(RankLost, match="rank 1 is gone"):
        ranks.check()


def test_rows_are_summed_over_peer_memory_only_where_it_holds_them() -> None:
    ranks = DeviceRanks(place_of(0, 2, 1), 100)
    assert ranks.shared_rows(torch.zeros(1, WIDTH)) is None
    ranks._sums = sums_of(torch.zeros(2, dtype=torch.int32))
    assert ranks.shared_rows(torch.zeros(4, WIDTH)) is ranks._sums.shared
    for other in (
        torch.zeros(5, WIDTH), torch.zeros(4, 2 * WIDTH), torch.zeros(4, WIDTH).double(),
        torch.zeros(4, 2 * WIDTH)[:, ::2],
    ):  # fmt: skip
        assert ranks.shared_rows(other) is None


@pytest.mark.parametrize("shares", [True, False])
def test_products_in_parts_are_computed_where_one_kernel_sums_them_over_the_ranks(
    shares: bool,
) -> None:
    x, out = torch.zeros(2, 3, 1, WIDTH), torch.zeros(3, WIDTH)
    ranks: Any = SimpleNamespace(shared_rows=lambda rows: object() if shares else None)
    parts = RowsLinear(lambda layer, rows, out: x[layer])
    summed = RowsLinear(lambda layer, rows, out: out, ranks=ranks)
    linear = over_peers(parts, summed)
    assert linear.ranks is ranks
    found = linear.multiply(1, 3, out)
    assert found.data_ptr() == (x[1] if shares else out).data_ptr()


class FakeDriver:
    """Notes what it is called with."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[tuple[str, list[Any]]] = []
        self._fails = fails

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == "cuGetErrorString":
                arguments[1]._obj.value = b"invalid device context"
                return 0
            if name in ("cuMemAlloc_v2", "cuIpcOpenMemHandle_v2"):
                arguments[0]._obj.value = 0x7000
            if name == "cuIpcGetMemHandle":
                ctypes.memset(ctypes.byref(arguments[0]._obj), 7, HANDLE_BYTES)
            self.calls.append((name, [getattr(each, "value", each) for each in arguments[1:]]))
            return 201 if name == self._fails else 0

        return call


def test_memory_is_filled_before_its_handle_is_given_away() -> None:
    driver = FakeDriver()
    memory = PeerMemory(3 << 20, 0x80008000, driver)
    assert (memory.address, memory.handle()) == (0x7000, bytes([7]) * HANDLE_BYTES)
    names = [name for name, _ in driver.calls]
    assert names == ["cuMemAlloc_v2", "cuMemsetD32_v2", "cuCtxSynchronize", "cuIpcGetMemHandle"]
    assert driver.calls[0][1] == [4 << 20]
    assert driver.calls[1][1] == [0x80008000, 1 << 20]
    assert memory.open(bytes(HANDLE_BYTES)) == 0x7000
    assert driver.calls[-1][1][1] == 1


def test_an_error_of_the_driver_says_what_was_called() -> None:
    with pytest.raises(PeerMemoryError, match=r"cuMemAlloc_v2: invalid device context \(201\)"):
        PeerMemory(1, 0, FakeDriver("cuMemAlloc_v2"))
