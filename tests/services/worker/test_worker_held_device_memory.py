"""Memory of a GPU behind descriptors: what the driver is asked for, over one that is pretended."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.services.worker.gpu.awaited_memory import AwaitedPiece
from penstock.services.worker.gpu.held_memory import DeviceMemory, HeldMemoryError
from penstock.services.worker.held.manifest import BadManifest, HeldPiece
from penstock.services.worker.held.memory import move, view

GRAIN = 4096


class PretendedDriver:
    """Physical memory is a file in memory, which lives as a device's does: until no handle, no
    mapping and no descriptor of it is left."""

    def __init__(self, fails: str = "", *, reads_alone: bool = True) -> None:
        self.calls: list[str] = []
        self.access: list[int] = []
        self.mapped: dict[int, mmap.mmap] = {}
        self.handles: dict[int, int] = {}
        """Descriptors of the driver's own."""
        self.reserved: list[int] = []
        self._fails, self._reads_alone = fails, reads_alone
        self._next = 1

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == self._fails:
                return 2
            return getattr(self, f"_{name.lower()}", lambda *_: 0)(*arguments) or 0

        if name.startswith("_"):
            raise AttributeError(name)
        return call

    def _cugeterrorstring(self, code: int, text: Any) -> None:
        text._obj.value = b"out of memory"

    def _cudevicegetuuid(self, name: Any, device: Any) -> None:
        ctypes.memset(name, 0xAB, 16)

    def _cumemgetallocationgranularity(self, grain: Any, *_: Any) -> None:
        grain._obj.value = GRAIN

    def _handle(self, descriptor: int) -> int:
        self._next += 1
        self.handles[self._next] = descriptor
        return self._next

    def _cumemcreate(self, handle: Any, size: Any, properties: Any, flags: Any) -> None:
        found = properties._obj
        assert (found.type, found.handle_types, found.location.type) == (1, 1, 1)
        assert ctypes.sizeof(found) == 32 and size.value % GRAIN == 0
        descriptor = os.memfd_create("device")
        os.ftruncate(descriptor, size.value)
        os.pwrite(descriptor, b"\xff" * size.value, 0)  # as a driver may leave it
        handle._obj.value = self._handle(descriptor)

    def _cumemexporttoshareablehandle(self, descriptor: Any, handle: Any, *_: Any) -> None:
        descriptor._obj.value = os.dup(self.handles[handle.value])

    def _cumemimportfromshareablehandle(self, handle: Any, descriptor: Any, kind: Any) -> None:
        handle._obj.value = self._handle(os.dup(descriptor.value))

    def _cumemaddressreserve(self, address: Any, size: Any, *_: Any) -> None:
        self._next += 1
        address._obj.value = self._next << 20
        self.reserved.append(size.value)

    def _cumemmap(self, address: Any, size: Any, offset: Any, handle: Any, flags: Any) -> None:
        self.mapped[address.value] = mmap.mmap(self.handles[handle.value], size.value)

    def _cumemsetaccess(self, address: Any, size: Any, access: Any, count: Any) -> int:
        flags = access._obj.flags
        if flags == 1 and not self._reads_alone:
            return 801
        self.access.append(flags)
        return 0

    def _cumemrelease(self, handle: Any) -> None:
        os.close(self.handles.pop(handle.value))

    def _cumemunmap(self, address: Any, size: Any) -> int:
        return 0 if self.mapped.pop(address.value, None) is not None else 1

    def tensor(self, mapping: Any) -> Tensor:
        told = mapping.__cuda_array_interface__
        assert told["typestr"] == "|u1" and told["version"] == 3
        found = torch.frombuffer(self.mapped[told["data"][0]], dtype=torch.uint8)
        assert told["shape"] == (len(found),) and not told["data"][1]
        return found


def memory_of(driver: PretendedDriver) -> DeviceMemory:
    return DeviceMemory(driver, driver.tensor, lambda: None)


@pytest.fixture
def tensors() -> Iterator[list[Tensor]]:
    with torch.inference_mode():
        yield [torch.randn(100, 33), torch.arange(7), torch.randn(2, 2).bfloat16()]


def test_what_one_process_writes_another_one_maps(tensors: list[Tensor]) -> None:
    values = [tensor.clone() for tensor in tensors]
    first = PretendedDriver()
    memory = memory_of(first)
    assert memory.place == "cuda-" + "ab" * 16
    placed, (piece,), (held,) = move(memory, tensors)
    assert first.access == [3, 1], "written first, and then for reading alone"
    assert first.handles == {}, "what is mapped needs no handle"
    assert not os.get_inheritable(piece.descriptor)
    second = PretendedDriver()
    opened = memory_of(second).open(piece.descriptor, held)
    assert second.access == [1]
    found = [view(place, [opened]) for place in placed]
    for mine, other, value in zip(found, tensors, values, strict=True):
        assert torch.equal(mine, value) and torch.equal(other, value)
    os.close(piece.descriptor)


def test_a_mapping_ends_with_its_last_tensor(tensors: list[Tensor]) -> None:
    driver = PretendedDriver()
    piece = memory_of(driver).make(100)
    os.close(piece.descriptor)
    assert len(driver.mapped) == 1
    del piece
    assert driver.mapped == {}
    assert driver.calls[-3:] == ["cuCtxSynchronize", "cuMemUnmap", "cuMemAddressFree"]


def test_memory_that_was_changed_since_is_not_used(tensors: list[Tensor]) -> None:
    memory = memory_of(PretendedDriver())
    _, (piece,), (held,) = move(memory, tensors)
    os.pwrite(piece.descriptor, b"\1", 513)
    with pytest.raises(BadManifest, match="was changed"):
        memory_of(PretendedDriver()).open(piece.descriptor, held)
    os.close(piece.descriptor)


def test_a_driver_that_does_not_part_reading_from_writing_allows_both(
    tensors: list[Tensor],
) -> None:
    driver = PretendedDriver(reads_alone=False)
    move(memory_of(driver), tensors)
    assert driver.access == [3, 3]


@pytest.mark.parametrize(
    "call",
    [
        "cuMemCreate",
        "cuMemExportToShareableHandle",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
    ],
)
def test_what_the_driver_refuses_is_told_by_name_and_nothing_stays(call: str) -> None:
    driver, before = PretendedDriver(call), len(os.listdir("/proc/self/fd"))
    with pytest.raises(HeldMemoryError, match=rf"{call}: out of memory \(2\)"):
        memory_of(driver).make(100)
    assert driver.handles == {} and driver.mapped == {}
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_cannot_be_imported_is_told(tensors: list[Tensor]) -> None:
    with pytest.raises(HeldMemoryError, match="cuMemImportFromShareableHandle"):
        memory_of(PretendedDriver("cuMemImportFromShareableHandle")).open(0, HeldPiece(10, 0))


# --- memory that is another process's for now

STEP = 2 * GRAIN


def awaited(driver: PretendedDriver, descriptor: int, size: int) -> AwaitedPiece:
    memory = memory_of(driver)

    def tensor_of(piece: Any) -> Tensor:
        address = piece.__cuda_array_interface__["data"][0]
        return torch.frombuffer(driver.mapped[address], dtype=torch.uint8)  # of the first part

    return AwaitedPiece(memory._driver, descriptor, size, memory._create, tensor_of, STEP)


def test_what_is_computed_ahead_touches_nothing_of_the_other_processs_memory() -> None:
    first, size = PretendedDriver(), 5 * GRAIN
    piece = memory_of(first).make(size)
    piece.memory.fill_(7)
    second = PretendedDriver()
    kv = awaited(second, piece.descriptor, size)
    assert second.reserved == [3 * STEP], "whole stand-ins"
    begin = kv.__cuda_array_interface__["data"][0]
    assert list(second.mapped) == [begin, begin + STEP, begin + 2 * STEP]
    assert second.calls.count("cuMemCreate") == 1 and second.handles == {}
    assert second.access == [3]
    second.mapped[begin][0] = 1
    assert second.mapped[begin + STEP][0] == 1, "one piece of memory, again and again"
    assert bool((piece.memory == 7).all())
    kv.withdraw()
    assert second.mapped == {} and "cuMemImportFromShareableHandle" not in second.calls
    os.close(piece.descriptor)


def test_its_memory_is_received_at_the_same_addresses_and_as_zeros() -> None:
    first, size = PretendedDriver(), 5 * GRAIN
    piece = memory_of(first).make(size)
    piece.memory.fill_(7)
    second = PretendedDriver()
    kv = awaited(second, piece.descriptor, size)
    begin = kv.__cuda_array_interface__["data"][0]
    zeroed = list[int]()
    kv.memory = SimpleNamespace(zero_=lambda: zeroed.append(len(second.mapped[begin])))  # type: ignore[assignment]
    kv.receive()
    assert list(second.mapped) == [begin] and zeroed == [size]
    assert second.mapped[begin][:] == b"\7" * size
    assert second.handles == {} and second.access == [3, 3]
    os.close(piece.descriptor)


def test_memory_that_the_driver_does_not_hand_over_is_an_error() -> None:
    piece = memory_of(PretendedDriver()).make(GRAIN)
    driver = PretendedDriver("cuMemImportFromShareableHandle")
    kv = awaited(driver, piece.descriptor, GRAIN)
    with pytest.raises(HeldMemoryError, match="cuMemImportFromShareableHandle: out of memory"):
        kv.receive()
    os.close(piece.descriptor)
