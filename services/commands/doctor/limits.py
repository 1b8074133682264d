"""What the system lets a process have: open files, processes, address space, shared memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from penstock.services.commands.doctor.finding import Finding, of_bytes

FEWEST_FILES, FEW_FILES = 256, 4096
"""A frontend keeps 128 for itself; every connection is one."""
FEW_TASKS = 1024
"""Processes and threads: a server has six processes, and torch a thread for each core."""
LEAST_SPACE = 16 << 30
"""Of addresses: libraries for CUDA alone map that much."""
SMALL_SHM = 1 << 30
"""NCCL asks for buffers of some megabytes for each pair of GPUs."""


def limits(gpus: int, shm: Path = Path("/dev/shm")) -> Iterator[Finding]:
    yield _files()
    yield _tasks()
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY and soft < LEAST_SPACE:
        yield Finding(
            "address space", of_bytes(soft), "problem", "ulimit -v unlimited before the server"
        )
    else:
        yield Finding("address space", _told(soft, size=True))
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield Finding("locked memory", f"{_told(soft, size=True)}, at most {_told(hard, size=True)}")
    yield _shared_memory(gpus, shm)


def _told(limit: int, *, size: bool = False) -> str:
    if limit == resource.RLIM_INFINITY:
        return "unlimited"
    return of_bytes(limit) if size else f"{limit:,}"


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    told = f"{_told(soft)}, at most {_told(hard)}"
    remedy = "raise it: ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of a container"
    if hard != resource.RLIM_INFINITY and hard < FEWEST_FILES:
        return Finding("open files", told, "problem", remedy)
    if hard != resource.RLIM_INFINITY and hard < FEW_FILES:
        return Finding(
            "open files", f"{told}: about {hard - 128:,} connections a frontend", "warning", remedy
        )
    return Finding("open files", told)


def _tasks() -> Finding:
    """The user's limit, and the control group's, which counts all that runs in a container."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = [soft] if soft != resource.RLIM_INFINITY else []
    told = _told(soft)
    for path in ("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            limits.append(int(text))
            told += f"; of this control group {int(text):,}"
        break
    if limits and min(limits) < FEW_TASKS:
        return Finding(
            "processes", told, "warning",
            "threads count too: ulimit -u, TasksMax= of systemd, --pids-limit of a container",
        )  # fmt: skip
    return Finding("processes", told)


def _shared_memory(gpus: int, shm: Path) -> Finding:
    try:
        found = os.statvfs(shm)
    except OSError:
        return Finding(
            "shared memory", f"no {shm}", "warning", "ranks of one model on several GPUs need it"
        )
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    told = f"{of_bytes(free)} free of {of_bytes(size)} in {shm}"
    if gpus > 1 and size < SMALL_SHM:
        return Finding(
            "shared memory", told, "warning",
            "NCCL needs more between several GPUs: --shm-size 1g of a container",
        )  # fmt: skip
    return Finding("shared memory", told)
