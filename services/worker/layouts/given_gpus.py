"""``--gpus``: how many GPUs of which kind, given or found."""

from __future__ import annotations

import re

import msgspec

from penstock.protocol.config import ConfigError
from penstock.services.worker.cuda_driver import CudaDevice, read_devices_in_time
from penstock.services.worker.gpus import GPUS, Gpu, gpu_named, gpu_of_driver
from penstock.services.worker.plan import PlannedDevice, device_found, device_of

AUTO = "auto"
MOST = 512
_GIVEN = re.compile(r"(\d{1,9}) *[x×*] *(\S.*)")


class GivenGpus(msgspec.Struct, frozen=True):
    count: int
    gpu: Gpu
    """Whose rates are counted with."""
    device: PlannedDevice
    """Each of them."""

    def __str__(self) -> str:
        return f"{self.count} × {self.device.name}"


def given_gpus(text: str) -> GivenGpus:
    """From ``8xh100``, or from what this machine has: ``auto``. Raises ``ConfigError``."""
    if text == AUTO:
        return gpus_of(read_devices_in_time(), f"--gpus {AUTO}")
    found = _GIVEN.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"--gpus {text}: expected a number and a kind, as in 8xh100, or {AUTO} for those of "
            f"this machine; kinds are {', '.join(GPUS)}"
        )
    count, gpu = int(found[1]), gpu_named(found[2], f"--gpus {text}")
    if not 1 <= count <= MOST:
        raise ConfigError(f"--gpus {text}: {count} GPUs; give 1 to {MOST}")
    return GivenGpus(count, gpu, device_of(gpu))


def gpus_of(devices: list[CudaDevice], asking: str) -> GivenGpus:
    """All of these, as the driver tells of them. asking: who wants to know, for the message of the
    ``ConfigError`` that is raised where they are none, of several kinds or of an unknown one."""
    names = list(dict.fromkeys(device.name for device in devices))
    if not names:
        raise ConfigError(
            f"{asking}: no CUDA device is here; name what to plan for, as in --gpus 8xh100"
        )
    if len(names) > 1:
        raise ConfigError(
            f"{asking}: GPUs of {len(names)} kinds are here ({', '.join(names)}), and a plan "
            "is for one; show it those of one kind with CUDA_VISIBLE_DEVICES"
        )
    gpu = gpu_of_driver(names[0])
    if gpu is None:
        raise ConfigError(
            f"{asking}: what a {names[0]} does in a second is not known; name one that is "
            f"like it, as in --gpus {len(devices)}xh100: kinds are {', '.join(GPUS)}"
        )
    least = min(devices, key=lambda device: device.total_bytes)
    return GivenGpus(len(devices), gpu, device_found(least))
