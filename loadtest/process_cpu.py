"""Processor time of a server's processes, by service."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import psutil


def cpu_of(processes: Mapping[psutil.Process, str]) -> Mapping[str, float]:
    """Seconds so far. processes: with the service of each."""
    found = defaultdict[str, float](float)
    for process, service in processes.items():
        found[service] += sum(process.cpu_times()[:2])
    return found


def service_of(process: psutil.Process) -> str:
    """From the title that a process of a server gives itself: ``penstock: SERVICE …``."""
    words: list[str] = process.name().removeprefix("penstock: ").split()
    return words[0]
