"""What the machine has, read without torch."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec


class Machine(msgspec.Struct, frozen=True):
    """Facts that settings are derived from."""

    cores: int
    """Logical cores that this process may use."""
    physical_cores: int
    gpus: int
    """CUDA devices that a process may use."""


VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""The environment variable by which CUDA shows a process only some devices."""


def visible_devices(text: str | None) -> list[str] | None:
    """The devices that ``VISIBLE_DEVICES`` names, numbers or UUIDs; ``None``: it shows all. As CUDA
    reads it: up to the first one that cannot be meant."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",")]
    return list(itertools.takewhile(lambda name: name and not name.startswith("-"), names))


def read_machine(
    root: Path = Path("/"), environment: Mapping[str, str] = MappingProxyType({})
) -> Machine:
    """Read it from /proc, /sys and /dev below ``root``, and which devices CUDA may show from
    ``environment``."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = [path for path in (root / "dev").glob("nvidia*") if path.name[6:].isdecimal()]
    count = len(gpus)
    shown = visible_devices(environment.get(VISIBLE_DEVICES))
    if shown is not None and gpus:  # UUIDs may name several parts of one device
        count = sum(not name.isdecimal() or int(name) < len(gpus) for name in shown)
    return Machine(cores or 1, _physical_cores(root, cores or 1), count)


def _physical_cores(root: Path, cores: int) -> int:
    """Distinct cores in the processor's topology; ``cores`` where it is not told."""
    lists = set()
    for path in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology/core_cpus_list"):
        try:
            lists.add(path.read_text().strip())
        except OSError:
            return cores
    return min(cores, len(lists)) if lists else cores


def triton_cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Where Triton keeps compiled kernels, as it reads ``environment``; by default that of this
    process."""
    found = os.environ if environment is None else environment
    if given := found.get("TRITON_CACHE_DIR"):
        return Path(given)
    home = found.get("TRITON_HOME") or Path.home()
    return Path(home) / ".triton" / "cache"
