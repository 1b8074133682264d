"""What the machine has, read without torch."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


class Machine(msgspec.Struct, frozen=True):
    """Facts that settings are derived from."""

    cores: int
    """Logical cores that this process may use."""
    physical_cores: int
    gpus: int
    """CUDA devices that the driver shows."""


def read_machine(root: Path = Path("/")) -> Machine:
    """Read it from /proc, /sys and /dev below ``root``."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = [path for path in (root / "dev").glob("nvidia*") if path.name[6:].isdecimal()]
    return Machine(cores or 1, _physical_cores(root, cores or 1), len(gpus))


def _physical_cores(root: Path, cores: int) -> int:
    """Distinct cores in the processor's topology; ``cores`` where it is not told."""
    lists = set()
    for path in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology/core_cpus_list"):
        try:
            lists.add(path.read_text().strip())
        except OSError:
            return cores
    return min(cores, len(lists)) if lists else cores
