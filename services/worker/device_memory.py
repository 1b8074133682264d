"""What a device's memory is used for, as its driver and the allocator tell."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch


class MemoryReading(NamedTuple):
    """Bytes of a device at one moment."""

    total: int
    free: int
    """Nobody's: neither this process's nor another one's."""
    held: int
    """What this process's allocator has taken from the device."""
    peak: int
    """The most that it has held since ``begin``."""


class DeviceMemory(Protocol):
    """Reads the memory of one device."""

    def begin(self) -> None:
        """Give back what nothing uses, and watch the peak from here on."""

    def read(self) -> MemoryReading: ...


class CudaMemory:
    """Of a CUDA device, with torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def read(self) -> MemoryReading:
        """What is held counts in whole pieces as they are taken from the driver, with what is
        unused in them: that is nobody else's either."""
        free, total = torch.cuda.mem_get_info(self._device)
        held = torch.cuda.memory_reserved(self._device)
        return MemoryReading(total, free, held, torch.cuda.max_memory_reserved(self._device))


class MeasuredStep(NamedTuple):
    """What the largest step takes of a device. All in bytes."""

    total: int
    outside: int
    """What is not the allocator's: the driver's context, kernels, other processes."""
    weights: int
    """What stays when the step's executor is gone."""
    step: int
    """What came on top, but for KV memory."""


def measure_step(memory: DeviceMemory, run: Callable[[], int]) -> MeasuredStep:
    """run: makes an executor, computes with it and drops it; returns the bytes of its KV memory."""
    memory.begin()
    kv_bytes = run()
    peak = memory.read().peak
    memory.begin()
    total, free, held, _ = memory.read()
    return MeasuredStep(total, total - free - held, held, max(0, peak - held - kv_bytes))
