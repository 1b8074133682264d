"""The holder: who gets weights, who waits for them, and when they are given back."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.protocol.config import ClusterConfig, Config
from penstock.protocol.wire.descriptors import close_all, send
from penstock.protocol.wire.messages.held_weights import WeightsHeld, WeightsKey
from penstock.protocol.wire.messages.membership import Capacity, Sleep, Sleeper
from penstock.services.holder.held import ASLEEP, HeldSets, HeldWeights, Lease
from penstock.services.holder.service import HolderService
from penstock.services.worker.held.holder import GivenWeights, HolderConnection, NoHolder

KEY = WeightsKey("model", "host", "digest")
OTHER = WeightsKey("model", "host", "another digest")


def weights(manifest: bytes = b"manifest") -> HeldWeights:
    return HeldWeights(manifest, [os.memfd_create("piece")], 10)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_one_loads_and_the_others_get_what_it_offers() -> None:
    sets, before = HeldSets(), open_files()
    lease = sets.want(KEY, 0.0)
    assert isinstance(lease, Lease)
    assert sets.want(KEY, 0.0) is None, "one is loading them"
    assert isinstance(sets.want(OTHER, 0.0), Lease)
    assert sets.offer(KEY, weights()) == ""
    sets.end(lease)
    for _ in range(2):
        found = sets.want(KEY, 0.0)
        assert isinstance(found, HeldWeights) and found.manifest == b"manifest"
        close_all(found.descriptors)
    assert (sets.served, sets.num_bytes) == (2, {"host": 10})
    sets.close()
    assert open_files() == before


def test_a_lease_that_ends_without_an_offer_is_the_next_ones() -> None:
    sets = HeldSets()
    lease = sets.want(KEY, 0.0)
    assert isinstance(lease, Lease)
    sets.end(lease)
    assert isinstance(sets.want(KEY, 0.0), Lease)


def test_others_of_the_same_model_and_place_are_dropped() -> None:
    sets, before = HeldSets(), open_files()
    sets.offer(KEY, weights())
    elsewhere = WeightsKey("model", "cuda-1", "digest")
    sets.offer(elsewhere, weights())
    assert isinstance(sets.want(OTHER, 0.0), Lease)
    assert sets.num_bytes == {"cuda-1": 10}
    sets.offer(OTHER, weights())
    sets.offer(OTHER, weights(b"second"))
    found = sets.want(OTHER, 0.0)
    assert isinstance(found, HeldWeights) and found.manifest == b"manifest", "the first ones stay"
    close_all(found.descriptors)
    sets.close()
    assert open_files() == before


def test_of_a_model_that_sleeps_nothing_is_held_nor_taken() -> None:
    sets, before = HeldSets(), open_files()
    sets.offer(KEY, weights())
    assert sets.release({"model", "other"}) == [KEY]
    assert sets.offer(KEY, weights()) == ASLEEP
    assert open_files() == before
    assert sets.release(set()) == []
    assert sets.offer(KEY, weights()) == ""
    sets.close()


def test_weights_that_no_worker_outlives_are_given_back() -> None:
    sets = HeldSets()
    sets.offer(KEY, weights())
    assert [sets.ended(KEY, 5.0), sets.ended(KEY, 59.0), sets.ended(KEY, 61.0)] == [False] * 3
    assert [sets.ended(KEY, 5.0), sets.ended(KEY, 5.0), sets.ended(KEY, 5.0)] == [
        False,
        False,
        True,
    ]
    assert isinstance(sets.want(KEY, 0.0), Lease)
    sets.offer(KEY, weights())
    assert not sets.ended(KEY, 5.0), "others have taken their place"
    sets.close()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[HolderService]:
    cluster = ClusterConfig(router=f"ipc://{tmp_path}/router.sock")
    service = HolderService(msgspec.structs.replace(Config(), cluster=cluster))
    service.start()
    yield service
    service.stop()
    service.mailbox.close()


def connection(holder: HolderService) -> HolderConnection:
    return HolderConnection(holder.config.cluster.holder_socket)


def want(one: HolderConnection) -> GivenWeights | None:
    return one.want(KEY, lambda: None)


def test_workers_hand_weights_on_over_the_socket(holder: HolderService) -> None:
    socket = Path(holder.config.cluster.holder_socket)
    assert stat.S_IMODE(socket.stat().st_mode) == 0o600
    first, second = connection(holder), connection(holder)
    assert want(first) is None, "it loads them"
    file = os.memfd_create("piece")
    os.write(file, b"weights")
    found: list[GivenWeights | None] = []
    waiting = threading.Thread(target=lambda: found.append(want(second)))
    waiting.start()
    assert first.offer(KEY, b"manifest", 7, [file]) == ""
    waiting.join(60)
    os.close(file)
    first.close()
    assert found[0] is not None and found[0].manifest == b"manifest"
    assert os.pread(found[0].descriptors[0], 10, 0) == b"weights"
    close_all(found[0].descriptors)
    second.close()


def test_who_waits_loads_when_the_one_that_was_to_do_so_is_gone(holder: HolderService) -> None:
    first, second = connection(holder), connection(holder)
    assert want(first) is None
    found: list[GivenWeights | None] = []
    waiting = threading.Thread(target=lambda: found.append(want(second)))
    waiting.start()
    first.close()
    waiting.join(60)
    assert found == [None]
    second.close()


def test_who_leaves_while_it_waits_keeps_nobody_from_loading(holder: HolderService) -> None:
    first, second = connection(holder), connection(holder)
    assert want(first) is None
    said: list[str] = []

    def waits() -> None:
        try:
            want(second)
        except NoHolder as failure:
            said.append(str(failure))

    waiting = threading.Thread(target=waits)
    waiting.start()
    second._socket.shutdown(2)
    waiting.join(60)
    assert said
    first.close()
    third = connection(holder)
    assert want(third) is None
    third.close()


def test_nonsense_ends_its_own_connection_alone(holder: HolderService) -> None:
    first = connection(holder)
    first._socket.sendall(b"\xff" * 100)
    with pytest.raises(NoHolder):
        first._receive()
    second = connection(holder)
    send(second._socket, WeightsHeld(b"x"))
    with pytest.raises(NoHolder):
        second._receive()
    third = connection(holder)
    assert want(third) is None
    for each in (first, second, third):
        each.close()


def test_it_gives_back_what_falls_asleep_and_says_what_it_has(holder: HolderService) -> None:
    one = connection(holder)
    file = os.memfd_create("piece")
    assert one.offer(KEY, b"manifest", 7, [file]) == ""
    holder.on_tick(0.0)
    assert holder.metrics.gauge("held_weights_bytes", "host").value == 7
    for state, held in ((Sleep.WAKING, 7), (Sleep.FALLING, 0), (Sleep.ASLEEP, 0)):
        holder.participant.sleepers = {"model": Sleeper("model", [], state, Capacity())}
        holder.on_tick(0.0)
        assert holder.metrics.gauge("held_weights_bytes", "host").value == held
    assert one.offer(KEY, b"manifest", 7, [file]) == ASLEEP
    holder.participant.sleepers, holder.participant.withdrawn = {}, {"model": None}
    holder.on_tick(0.0)
    assert one.offer(KEY, b"manifest", 7, [file]) == ASLEEP
    holder.participant.withdrawn = {}
    holder.on_tick(0.0)
    assert one.offer(KEY, b"manifest", 7, [file]) == ""
    os.close(file)
    one.close()


def test_a_worker_hears_of_the_holders_end_and_who_comes_later_is_told(tmp_path: Path) -> None:
    cluster = ClusterConfig(router=f"ipc://{tmp_path}/router.sock")
    config = msgspec.structs.replace(Config(), cluster=cluster)
    with pytest.raises(NoHolder, match="no holder at"):
        HolderConnection(cluster.holder_socket)
    service = HolderService(config)
    service.start()
    one = HolderConnection(cluster.holder_socket)
    assert want(one) is None
    ended = threading.Thread(target=one.wait_for_end)
    ended.start()
    service.stop()
    service.mailbox.close()
    one._socket.shutdown(2)
    ended.join(60)
    assert not ended.is_alive()
    one.close()
    assert not Path(cluster.holder_socket).exists()
