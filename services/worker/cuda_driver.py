"""What the CUDA driver says of the device, asked without torch and without a context."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

_MULTIPROCESSORS, _MAJOR, _MINOR, _SHARED_BYTES = 16, 75, 76, 97
"""CUdevice_attribute: how many there are, compute capability, and shared memory that a program may
ask for."""


class CudaDevice(NamedTuple):
    name: str
    capability: tuple[int, int]
    shared_bytes: int
    total_bytes: int
    multiprocessors: int


def read_device() -> CudaDevice | None:
    """The first device that CUDA shows; ``None``: there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, total = ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(128)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    if driver.cuDeviceTotalMem_v2(ctypes.byref(total), device):
        return None
    driver.cuDeviceGetName(name, len(name), device)
    capability = attribute(_MAJOR), attribute(_MINOR)
    return CudaDevice(
        name.value.decode(), capability, attribute(_SHARED_BYTES), total.value,
        attribute(_MULTIPROCESSORS),
    )  # fmt: skip
