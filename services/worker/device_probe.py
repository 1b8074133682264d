"""What torch and the driver say of the devices, as one JSON object on standard output.

    python -m penstock.services.worker.device_probe

A process of its own, for commands that import no torch.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import msgspec
import torch


def driver_cuda() -> str | None:
    """The newest version of CUDA that the driver does; ``None``: there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(number)):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def probe() -> dict[str, Any]:
    """See ``penstock.services.commands.doctor.hardware.Probe``."""
    devices = []
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        devices.append(
            {
                "name": torch.cuda.get_device_name(index),
                "capability": torch.cuda.get_device_capability(index),
                "total_bytes": total,
                "free_bytes": free,
            }
        )
    return {
        "torch": str(torch.__version__),
        "built_for": torch.version.cuda,
        "driver_cuda": driver_cuda(),
        "threads": torch.get_num_threads(),
        "devices": devices,
    }


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(probe()).decode() + "\n")
