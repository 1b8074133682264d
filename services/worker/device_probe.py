"""What torch and the driver say of the devices, as one JSON object on standard output; then what a
computation on each device came to, an object in a line each, as soon as it is known.

    python -m penstock.services.worker.device_probe

A process of its own, for commands that import no torch.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

SIDE = 256
"""Rows and columns of the matrices that are multiplied."""


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
        "type": "probe",
        "torch": str(torch.__version__),
        "built_for": torch.version.cuda,
        "driver_cuda": driver_cuda(),
        "threads": torch.get_num_threads(),
        "devices": devices,
    }


def products(count: int) -> Iterator[dict[str, Any]]:
    """A product of matrices on each of ``count`` devices, compared with the CPU's. See
    ``penstock.services.commands.doctor.hardware.Product``.

    The factors are whole numbers up to 3, so every sum of products is a whole number that float32
    and TF32 hold exactly in any order: one entry that differs is wrong.
    """
    entries = torch.arange(SIDE * SIDE).mul(31).remainder(7).sub(3)
    factor = entries.reshape(SIDE, SIDE).to(torch.float32)
    right = factor @ factor.T
    for device in range(count):
        wrong, error = 0, ""
        try:
            there = factor.to(f"cuda:{device}")
            wrong = int((there @ there.T).cpu().ne(right).sum())
        except RuntimeError as refused:
            error = (str(refused).splitlines() or [type(refused).__name__])[0]
        yield {"type": "product", "device": device, "wrong": wrong, "error": error}


def main() -> None:
    found = probe()
    _write(found)
    for line in products(len(found["devices"])):
        _write(line)


def _write(line: dict[str, Any]) -> None:
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
