"""Addresses of a GPU for memory that is another process's until that ends.

A worker that is prepared for the end of another one is to have its KV memory. It makes tensors,
launches kernels and records graphs with the addresses long before: addresses are reserved and
memory is mapped to them in two calls of CUDA's virtual memory management. Until its preparation is
over, one small piece of memory lies behind all of them, again and again, so that nothing it
computes can touch what the other one still reads ("Virtual Aliasing Support", CUDA programming
guide).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from penstock.services.worker.gpu.held_memory import Driver

STAND_IN_BYTES = 256 << 20
_NONE, _NO_OFFSET = ctypes.c_ulonglong(0), ctypes.c_size_t(0)


class AwaitedPiece:
    """See ``penstock.services.worker.held.memory.AwaitedMemory`` and, once it is received,
    ``resting_memory.LeavingPiece``. The addresses stay reserved until
    the process ends."""

    def __init__(
        self,
        driver: Driver,
        descriptor: int,
        num_bytes: int,
        create: Callable[[int], ctypes.c_uint64],
        tensor_of: Callable[[object], Tensor],
        stand_in_bytes: int = STAND_IN_BYTES,
    ) -> None:
        """num_bytes: as the driver hands them out; create: makes a piece of memory of so many
        bytes. The descriptor stays the caller's. Raises ``HeldMemoryError``."""
        self._driver, self._descriptor, self._num_bytes = driver, descriptor, num_bytes
        self._create = create
        self._step = min(stand_in_bytes, num_bytes)
        self._reserved = -(-num_bytes // self._step) * self._step
        address = ctypes.c_uint64()
        driver(
            "cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(self._reserved),
            _NO_OFFSET, ctypes.c_uint64(0), _NONE,
        )  # fmt: skip
        self._address = address.value
        stand_in = create(self._step)
        try:
            for place in self._places():
                self._map(place, self._step, stand_in)
        finally:
            driver.code("cuMemRelease", stand_in)  # what is mapped stays
        driver.allow_writing(self._address, self._reserved)
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (self._address, False), "version": 3,
        }  # fmt: skip
        self.memory = tensor_of(self)
        self._stands_in = True

    def withdraw(self) -> None:
        if not self._stands_in:
            return
        self._stands_in = False
        for place in self._places():
            self._driver("cuMemUnmap", ctypes.c_uint64(place), ctypes.c_size_t(self._step))

    def receive(self) -> None:
        self.withdraw()
        handle = ctypes.c_uint64()
        self._driver.import_from(self._descriptor, handle)
        self._behind(handle)
        with torch.inference_mode():
            self.memory.zero_()

    def give_back(self) -> None:
        self._driver("cuMemUnmap", ctypes.c_uint64(self._address), ctypes.c_size_t(self._num_bytes))

    def take_again(self) -> int:
        handle = self._create(self._num_bytes)
        descriptor = self._driver.exported(handle)
        try:
            self._behind(handle)
        except RuntimeError:
            os.close(descriptor)
            raise
        return descriptor

    def protect(self) -> None:
        """It is written to all the time."""

    def _behind(self, handle: ctypes.c_uint64) -> None:
        """Have all of this memory behind the addresses. Takes the handle over."""
        try:
            self._map(self._address, self._num_bytes, handle)
        finally:
            self._driver.code("cuMemRelease", handle)
        self._driver.allow_writing(self._address, self._num_bytes)

    def _places(self) -> range:
        return range(self._address, self._address + self._reserved, self._step)

    def _map(self, address: int, num_bytes: int, handle: ctypes.c_uint64) -> None:
        self._driver(
            "cuMemMap", ctypes.c_uint64(address), ctypes.c_size_t(num_bytes), _NO_OFFSET, handle,
            _NONE,
        )  # fmt: skip
