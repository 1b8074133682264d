"""Copies from pinned memory to a CUDA device, by calls of the CUDA runtime.

Torch's own calls do the same and give the interpreter's lock up and take it again on their way, for
which threads that copy piece after piece wait for each other: 16.4 GB of weights came at 31 GB/s
with them, at 43 with these (pieces of 8 and 4 MiB, eight threads, NVIDIA H200).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

TO_DEVICE = 1
"""``cudaMemcpyHostToDevice``."""
NO_TIMING = 2
"""``cudaEventDisableTiming``."""


class CopyError(RuntimeError):
    """The CUDA runtime refused a call, or an earlier copy has failed."""


class _Runtime:
    """The functions of the CUDA runtime that torch has loaded: the loader finds it by its name.

    ``wait`` gives the interpreter's lock up, the others are too short for it.
    """

    def __init__(self, version: str) -> None:
        name = f"libcudart.so.{version.partition('.')[0]}"
        short, long = ctypes.PyDLL(name), ctypes.CDLL(name)
        address = ctypes.c_void_p
        size, number = ctypes.c_size_t, ctypes.c_int
        self.copy = short.cudaMemcpyAsync
        self.copy.argtypes = [address, address, size, number, address]
        self.new_event = short.cudaEventCreateWithFlags
        self.new_event.argtypes = [ctypes.POINTER(address), ctypes.c_uint]
        self.record = short.cudaEventRecord
        self.record.argtypes = [address, address]
        self.wait = long.cudaEventSynchronize
        self.wait.argtypes = [address]
        self.drop_event = short.cudaEventDestroy
        self.drop_event.argtypes = [address]
        self._explain = short.cudaGetErrorString
        self._explain.argtypes, self._explain.restype = [number], ctypes.c_char_p

    def check(self, code: int) -> None:
        if code:
            raise CopyError(f"a copy to the device failed: {self._explain(code).decode()}")


@cache
def _runtime() -> _Runtime | None:
    """``None`` where there is no such library."""
    if torch.version.cuda is None:
        return None
    try:
        return _Runtime(torch.version.cuda)
    except (OSError, AttributeError):
        return None


class DirectCopies:
    """Copies out of one buffer, on one stream: the buffer is free again after ``wait``."""

    @staticmethod
    def possible() -> bool:
        return _runtime() is not None

    def __init__(self, stream: int) -> None:
        """stream: its handle. Only where ``possible``; raises ``CopyError``."""
        runtime = _runtime()
        if runtime is None:
            raise CopyError("torch's CUDA runtime is not to be found")
        self._runtime, self._stream = runtime, stream
        event: Any = ctypes.c_void_p()
        runtime.check(runtime.new_event(ctypes.byref(event), NO_TIMING))
        self._event: int = event.value

    def copy(self, target: int, source: int, count: int) -> None:
        """Begin to copy bytes between two addresses. Raises ``CopyError``."""
        runtime = self._runtime
        runtime.check(runtime.copy(target, source, count, TO_DEVICE, self._stream))

    def mark(self) -> None:
        """``wait`` is for what was begun before this."""
        self._runtime.check(self._runtime.record(self._event, self._stream))

    def wait(self) -> None:
        """Wait until the marked copies are done; before the first mark there is no wait."""
        self._runtime.check(self._runtime.wait(self._event))

    def __del__(self) -> None:
        if event := getattr(self, "_event", None):
            self._runtime.drop_event(event)
