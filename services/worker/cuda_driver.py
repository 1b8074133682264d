"""What the CUDA driver says of the device, asked without torch and without a context.

``python -m penstock.services.worker.cuda_driver`` prints it,
for who must not wait for a driver that hangs.
"""

from __future__ import annotations

import ctypes
import sys
from typing import NamedTuple

import msgspec

from penstock.protocol.config.sources import ConfigError
from penstock.protocol.process.limited_process import answer_within

_MULTIPROCESSORS, _MAJOR, _MINOR, _SHARED_BYTES = 16, 75, 76, 97
"""CUdevice_attribute: how many there are, compute capability, and shared memory that a program may
ask for."""


class CudaDevice(NamedTuple):
    name: str
    capability: tuple[int, int]
    shared_bytes: int
    total_bytes: int
    multiprocessors: int


DRIVER_S = 60.0
"""The first call of a machine loads the driver's firmware, on a host of eight GPUs for ten seconds
and more."""


def read_device() -> CudaDevice | None:
    """The first device that CUDA shows; ``None``: there is none."""
    return next(iter(read_devices(1)), None)


def read_devices(most: int = 1024) -> list[CudaDevice]:
    """The devices that CUDA shows, in its order."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found = [_read(driver, index) for index in range(min(count.value, most))]
    return [device for device in found if device is not None]


def read_devices_in_time(limit_s: float = DRIVER_S) -> list[CudaDevice]:
    """``read_devices`` in a process of its own. Raises ``ConfigError`` where the driver does not
    answer within ``limit_s``."""
    answer = answer_within([sys.executable, "-m", __name__], limit_s)
    if not answer.in_time:
        raise ConfigError(
            f"the NVIDIA driver does not say what GPUs are here: {answer.ending}. nvidia-smi and "
            "dmesg may show why, and a restart of the machine frees a stuck driver; --device cpu "
            "serves without it"
        )
    try:
        return msgspec.json.decode(answer.output, type=list[CudaDevice])
    except msgspec.MsgspecError:
        return []


def _read(driver: ctypes.CDLL, index: int) -> CudaDevice | None:
    device, total = ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(128)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    if driver.cuDeviceGet(ctypes.byref(device), index):
        return None
    if driver.cuDeviceTotalMem_v2(ctypes.byref(total), device):
        return None
    driver.cuDeviceGetName(name, len(name), device)
    capability = attribute(_MAJOR), attribute(_MINOR)
    return CudaDevice(
        name.value.decode(), capability, attribute(_SHARED_BYTES), total.value,
        attribute(_MULTIPROCESSORS),
    )  # fmt: skip


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(read_devices()).decode())
