"""Memory of a GPU that outlives the process that made it: CUDA's virtual memory management, called
directly.

A piece is physical memory that is exported as a file descriptor. It is given back when no process
has it mapped and nobody has the descriptor open ("including its shareable counterparts",
``cuMemRelease``): so a process without CUDA can keep it. The older interprocess handles
(``peer_memory``) end with the process that made them. Signatures: CUDA driver API, ``cuda.h``.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.services.worker.gpu.awaited_memory import AwaitedPiece
from penstock.services.worker.gpu.resting_memory import RestingMemory, pinned_memory
from penstock.services.worker.held.manifest import BadManifest, HeldPiece
from penstock.services.worker.held.memory import Piece

PIECE_BYTES = 1 << 30
_PINNED, _DEVICE, _DESCRIPTOR, _LEAST = 1, 1, 1, 0
"""CUmemAllocationType, CUmemLocationType, CUmemAllocationHandleType, and
CUmemAllocationGranularity_flags."""
_READ, _READ_WRITE = 1, 3
"""CUmemAccess_flags."""
_ORDINAL = 0
"""A worker sees one device alone."""


class HeldMemoryError(RuntimeError):
    """The driver refuses. Says what."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class Driver:
    def __init__(self, library: Any) -> None:
        self._library = library

    def __call__(self, name: str, *arguments: Any) -> None:
        """Raises ``HeldMemoryError``."""
        self.check(name, self.code(name, *arguments))

    def check(self, name: str, code: int) -> None:
        """code: what ``name`` has answered. Raises ``HeldMemoryError``."""
        if code:
            said = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(said))
            reason = said.value.decode(errors="replace") if said.value else "unknown"
            raise HeldMemoryError(f"{name}: {reason} ({code})")

    def code(self, name: str, *arguments: Any) -> int:
        return int(getattr(self._library, name)(*arguments))

    def import_from(self, descriptor: int, handle: ctypes.c_uint64) -> None:
        """Let ``handle`` be of the memory behind a descriptor. Raises ``HeldMemoryError``."""
        self(
            "cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptor),
            ctypes.c_int(_DESCRIPTOR),
        )  # fmt: skip

    def exported(self, handle: ctypes.c_uint64) -> int:
        """A descriptor of new memory, which no program that is started inherits; else the memory
        is given back. Raises ``HeldMemoryError``."""
        descriptor = ctypes.c_int(-1)
        try:
            self(
                "cuMemExportToShareableHandle", ctypes.byref(descriptor), handle,
                ctypes.c_int(_DESCRIPTOR), ctypes.c_ulonglong(0),
            )  # fmt: skip
        except HeldMemoryError:
            self.code("cuMemRelease", handle)
            raise
        os.set_inheritable(descriptor.value, False)
        return descriptor.value

    def allow(self, address: int, num_bytes: int, *, writing: bool) -> int:
        """Returns the driver's code."""
        flags = _READ_WRITE if writing else _READ
        access = _Access(_Location(_DEVICE, _ORDINAL), flags)
        size, count = ctypes.c_size_t(num_bytes), ctypes.c_size_t(1)
        return self.code(
            "cuMemSetAccess", ctypes.c_uint64(address), size, ctypes.byref(access), count
        )

    def allow_writing(self, address: int, num_bytes: int) -> None:
        """Raises ``HeldMemoryError``."""
        self.check("cuMemSetAccess", self.allow(address, num_bytes, writing=True))


class _Mapping:
    """A piece in this process's addresses, for as long as this object lives."""

    def __init__(self, driver: Driver, handle: ctypes.c_uint64, num_bytes: int) -> None:
        """Takes the handle over. Raises ``HeldMemoryError``."""
        self._driver, size, none = driver, ctypes.c_size_t(num_bytes), ctypes.c_uint64(0)
        self._address, self._size = ctypes.c_uint64(), size
        try:
            driver(
                "cuMemAddressReserve", ctypes.byref(self._address), size, ctypes.c_size_t(0), none,
                none,
            )  # fmt: skip
        except HeldMemoryError:
            driver.code("cuMemRelease", handle)
            raise
        try:
            self.map(handle)
        except HeldMemoryError:
            driver.code("cuMemAddressFree", self._address, size)
            raise
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (self._address.value, False),
            "version": 3,
        }  # fmt: skip
        end = weakref.finalize(self, _unmap, driver, self._address, size)
        end.atexit = False  # the driver is gone by then, and the process with it

    def map(self, handle: ctypes.c_uint64) -> None:
        """Have this memory behind the addresses, which have none. Takes the handle over. Raises
        ``HeldMemoryError``."""
        none = ctypes.c_uint64(0)
        try:
            self._driver("cuMemMap", self._address, self._size, ctypes.c_size_t(0), handle, none)
        finally:
            self._driver.code("cuMemRelease", handle)  # what is mapped stays

    def unmap(self) -> None:
        """Keep the addresses alone. Raises ``HeldMemoryError``."""
        self._driver("cuMemUnmap", self._address, self._size)

    def allow_writing(self) -> None:
        """Raises ``HeldMemoryError``."""
        self._driver.allow_writing(self._address.value, self._size.value)

    def allow_reading(self) -> None:
        """To read, and where the driver does not part the two, to write. A kernel that writes where
        it should not then cannot change weights that others go on with. Raises
        ``HeldMemoryError``."""
        if self._driver.allow(self._address.value, self._size.value, writing=False):
            self.allow_writing()


def _unmap(driver: Driver, address: ctypes.c_uint64, size: ctypes.c_size_t) -> None:
    driver.code("cuCtxSynchronize")
    driver.code("cuMemUnmap", address, size)
    driver.code("cuMemAddressFree", address, size)


class DevicePiece:
    """See ``penstock.services.worker.held.memory.Piece`` and ``resting_memory.LeavingPiece``."""

    def __init__(
        self,
        descriptor: int,
        mapping: _Mapping,
        tensor_of: Callable[[object], Tensor],
        new: Callable[[], tuple[ctypes.c_uint64, int]],
    ) -> None:
        """new: as much memory again, as its handle and a descriptor."""
        self.descriptor, self._mapping, self._new = descriptor, mapping, new
        self.memory = tensor_of(mapping)

    def write(self, offset: int, tensor: Tensor) -> None:
        values = tensor.reshape(-1).view(torch.uint8)
        self.memory[offset : offset + len(values)].copy_(values)

    def finish(self) -> int:
        checksum = self.checksum()  # which waits for the copies, too
        self._mapping.allow_reading()
        return checksum

    def give_back(self) -> None:
        self._mapping.unmap()

    def take_again(self) -> int:
        handle, descriptor = self._new()
        try:
            self._mapping.map(handle)
            self._mapping.allow_writing()
        except HeldMemoryError:
            os.close(descriptor)
            raise
        return descriptor

    def protect(self) -> None:
        self._mapping.allow_reading()

    def checksum(self) -> int:
        """The sum of all numbers of 64 bits, modulo 2^64: one reading of the memory."""
        return int(self.memory.view(torch.int64).sum())


class DeviceMemory:
    """See ``penstock.services.worker.held.memory.HeldMemory``: the device that this process
    sees."""

    piece_bytes = PIECE_BYTES

    def __init__(
        self,
        library: Any = None,
        tensor_of: Callable[[object], Tensor] = lambda mapping: torch.as_tensor(
            mapping, device="cuda"
        ),
        free: Callable[[], None] = torch.cuda.empty_cache,
    ) -> None:
        """tensor_of: makes a tensor of what has ``__cuda_array_interface__``; free: gives memory
        that torch's allocator does not use back to the driver. Raises ``HeldMemoryError``."""
        self._driver = Driver(library or _load_driver())
        self._tensor_of, self._free = tensor_of, free
        self._driver("cuInit", ctypes.c_uint(0))
        device, name = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        self._driver("cuDeviceGet", ctypes.byref(device), _ORDINAL)
        self._driver("cuDeviceGetUuid", ctypes.byref(name), device)
        self.place = f"cuda-{bytes(name).hex()}"
        """A device has another number in each process, and this name in all."""
        self._properties = _Properties(_PINNED, _DESCRIPTOR, _Location(_DEVICE, _ORDINAL))
        grain = ctypes.c_size_t()
        self._driver(
            "cuMemGetAllocationGranularity", ctypes.byref(grain), ctypes.byref(self._properties),
            ctypes.c_int(_LEAST),
        )  # fmt: skip
        self._grain = grain.value

    def make(self, num_bytes: int) -> DevicePiece:
        """See ``HeldMemory``; num_bytes are filled up with zeros to what the driver hands out."""
        self._free()
        size = self._whole(num_bytes)
        handle, descriptor = self._new(size)
        try:
            mapping = _Mapping(self._driver, handle, size)
            mapping.allow_writing()
        except HeldMemoryError:
            os.close(descriptor)
            raise
        piece = self._piece(descriptor, mapping, size)
        piece.memory.zero_()
        return piece

    def open(self, descriptor: int, piece: HeldPiece) -> DevicePiece:
        """See ``HeldMemory``."""
        handle = ctypes.c_uint64()
        self._driver.import_from(descriptor, handle)
        size = self._whole(piece.num_bytes)
        mapping = _Mapping(self._driver, handle, size)
        mapping.allow_reading()
        found = self._piece(descriptor, mapping, size)
        if found.checksum() != piece.checksum:
            raise BadManifest("the memory was changed since the weights were made")
        return found

    def awaited(self, descriptor: int, num_bytes: int) -> AwaitedPiece:
        """See ``HeldMemory``."""
        size = self._whole(num_bytes)
        return AwaitedPiece(self._driver, descriptor, size, self._create, self._tensor_of)

    def resting(self, pieces: Sequence[Piece], kv: object) -> RestingMemory:
        """See ``HeldMemory``."""
        own = [piece for piece in pieces if isinstance(piece, DevicePiece)]
        kv_memory = kv if isinstance(kv, DevicePiece | AwaitedPiece) else None
        return RestingMemory(own, kv_memory, partial(pinned_memory, self._driver), self._free)

    def _piece(self, descriptor: int, mapping: _Mapping, size: int) -> DevicePiece:
        return DevicePiece(descriptor, mapping, self._tensor_of, partial(self._new, size))

    def _new(self, size: int) -> tuple[ctypes.c_uint64, int]:
        """New memory: its handle and a descriptor."""
        handle = self._create(size)
        return handle, self._driver.exported(handle)

    def _create(self, size: int) -> ctypes.c_uint64:
        """A handle of new memory, of a size that the driver hands out."""
        handle = ctypes.c_uint64()
        self._driver(
            "cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size),
            ctypes.byref(self._properties), ctypes.c_ulonglong(0),
        )  # fmt: skip
        return handle

    def _whole(self, num_bytes: int) -> int:
        return -(-num_bytes // self._grain) * self._grain


def _load_driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as failure:
        raise HeldMemoryError(f"the CUDA driver cannot be loaded: {failure}") from None
