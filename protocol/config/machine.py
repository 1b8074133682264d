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
    multiplies_bf16: bool = True
    """Whether the CPU has instructions by which oneDNN computes products in bfloat16."""
    free_bytes: int = 0
    """Memory that a process may still take."""


_CGROUP = Path("/sys/fs/cgroup")
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
    return Machine(
        cores or 1,
        _physical_cores(root, cores or 1),
        count,
        _multiplies_bf16(root),
        free_host_bytes(root),
    )


def free_host_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may still take: the machine's, or its control group's if less."""
    free = _available(root)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        if limit != "max":
            free = min(free, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass  # no control group with a limit
    return free


def _available(root: Path) -> int:
    """What Linux estimates that new processes may take, else what nobody uses."""
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, number = line.partition(":")
            if name == "MemAvailable":
                return int(number.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass  # the system tells it otherwise
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _multiplies_bf16(root: Path) -> bool:
    """AVX-512 with these parts, of which oneDNN asks no more, or Arm's own; true where the
    processor does not tell."""
    try:
        text = (root / "proc/cpuinfo").read_text()
    except (OSError, UnicodeDecodeError):
        return True
    for line in text.splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            found = set(flags.split())
            return found >= {"avx512bw", "avx512dq", "avx512vl"} or "bf16" in found
    return True


def _physical_cores(root: Path, cores: int) -> int:
    """Distinct cores in the processor's topology; ``cores`` where it is not told."""
    lists = set()
    for path in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology/core_cpus_list"):
        try:
            lists.add(path.read_text().strip())
        except OSError:
            return cores
    return min(cores, len(lists)) if lists else cores


def this_machine() -> Machine:
    """As this process may use it."""
    return read_machine(environment=os.environ)


def triton_cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Where Triton keeps compiled kernels, as it reads ``environment``; by default that of this
    process."""
    found = os.environ if environment is None else environment
    if given := found.get("TRITON_CACHE_DIR"):
        return Path(given)
    home = found.get("TRITON_HOME") or Path.home()
    return Path(home) / ".triton" / "cache"
