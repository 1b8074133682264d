"""Times of one kernel: a call repeated, alone on the device.

On CUDA up to 50 calls are captured in a graph, as the step's kernels are, so that launches cost no
time of the host; events around the graph give the mean of the calls, programmatic dependent launch
included. *Cold*: every call alone between two events, after a buffer larger than the L2 cache was
written; the events then add a microsecond or two. On the CPU the clock is read around so many
calls that its own cost is nothing, or, cold, around each one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import msgspec
import torch

_LEAST_SECONDS = {"cpu": 2e-4, "cuda": 2e-3}
"""Calls are repeated until they take about so long together."""
_MOST_CALLS = {"cpu": 1000, "cuda": 50}
_BUFFER_BYTES = {"cpu": 256 << 20, "cuda": 512 << 20}
_AHEAD = 20
"""Writes of the buffer that keep a GPU busy while the host puts the repetitions on the stream."""

Work = Callable[[], object]


class Times(msgspec.Struct, frozen=True):
    """Seconds of one call over the repetitions."""

    median: float
    least: float
    most: float


class KernelTimer:
    """Times calls on one device. A call's first runs compile it and are not counted."""

    def __init__(
        self, device: torch.device, *, repetitions: int, warm_up: int, cold: bool = False
    ) -> None:
        self._kind = device.type
        self._repetitions = repetitions
        self._warm_up = warm_up
        self._cold = cold
        size = _BUFFER_BYTES[device.type] if cold or device.type == "cuda" else 0
        self._buffer = torch.empty(size, dtype=torch.int8, device=device)

    def times(self, work: Work) -> Times:
        for _ in range(self._warm_up):
            work()
        calls = 1 if self._cold else self._calls(work)
        measure = self._on_cuda if self._kind == "cuda" else self._on_cpu
        found = measure(work, calls)
        return Times(statistics.median(found), min(found), max(found))

    def _calls(self, work: Work) -> int:
        """How many calls are timed together."""
        self._wait()
        began = time.perf_counter()
        work()
        self._wait()
        took = max(time.perf_counter() - began, 1e-9)
        return max(1, min(_MOST_CALLS[self._kind], round(_LEAST_SECONDS[self._kind] / took)))

    def _wait(self) -> None:
        if self._kind == "cuda":
            torch.cuda.synchronize()

    def _on_cpu(self, work: Work, calls: int) -> list[float]:
        found = []
        for _ in range(self._repetitions):
            self._buffer.zero_()
            began = time.perf_counter()
            for _ in range(calls):
                work()
            found.append((time.perf_counter() - began) / calls)
        return found

    def _on_cuda(self, work: Work, calls: int) -> list[float]:
        repeated = work if self._cold else _recorded(work, calls)
        repeated()
        for _ in range(_AHEAD):
            self._buffer.zero_()
        pairs = []
        for _ in range(self._repetitions):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            if self._cold:
                self._buffer.zero_()
            begin.record()
            repeated()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 / calls for begin, end in pairs]


def _recorded(work: Work, calls: int) -> Work:
    """``work`` several times in a row, as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    return graph.replay
