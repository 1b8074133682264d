"""Copies from pinned memory to a CUDA device, by a call of the CUDA runtime.

``Tensor.copy_`` does the same and gives the interpreter's lock up and takes it again on its way,
for which threads that copy piece after piece wait for each other: 16.4 GB of weights came at 31
GB/s with it, at 50 with this (pieces of 8 and 4 MiB, eight threads, NVIDIA H200).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

TO_DEVICE = 1
"""``cudaMemcpyHostToDevice``."""

Copy = Callable[[int, int, int, int], None]
"""(target, source, bytes, stream): addresses, and the handle of a stream."""


@cache
def direct_copy() -> Copy | None:
    """The call, or ``None`` where torch's CUDA runtime is not to be found."""
    version = torch.version.cuda
    if version is None:
        return None
    try:
        # The one that torch has loaded: the loader finds it by this name.
        runtime = ctypes.PyDLL(f"libcudart.so.{version.partition('.')[0]}")
        call = runtime.cudaMemcpyAsync
        explain = runtime.cudaGetErrorString
    except (OSError, AttributeError):
        return None
    address, size = ctypes.c_void_p, ctypes.c_size_t
    call.argtypes = [address, address, size, ctypes.c_int, address]
    call.restype = ctypes.c_int
    explain.argtypes, explain.restype = [ctypes.c_int], ctypes.c_char_p

    def copy(target: int, source: int, count: int, stream: int) -> None:
        if code := call(target, source, count, TO_DEVICE, stream):
            raise RuntimeError(f"a copy to the device failed: {explain(code).decode()}")

    return copy
