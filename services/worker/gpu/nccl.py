"""NCCL, called directly: collectives on the current stream, which graphs record, and that end when
another thread says so.

torch's own process groups launch on a stream of their own, and their time limits do not see what a
graph replays. The library is the one that torch has loaded. Signatures: NCCL 2.x, ``nccl.h``.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

UNIQUE_ID_BYTES = 128
MULTICAST = "NCCL_NVLS_ENABLE"
"""Whether NCCL uses NVLink multicast, as it reads it once, when the first group is made."""
_TYPES = {
    torch.int8: 0, torch.uint8: 1, torch.int32: 2, torch.int64: 4,
    torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9,
}  # fmt: skip
_SUM = 0
_IN_PROGRESS = 7


class NcclError(RuntimeError):
    """A call of NCCL failed; the communicator is of no use any more."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


def load_nccl() -> ctypes.CDLL:
    """The library. Raises ``NcclError`` where torch was built without it."""
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError as failure:
        raise NcclError(
            f"NCCL, by which the ranks of an engine talk on GPUs, cannot be loaded: {failure}"
        ) from None
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


class Communicator:
    """The connections of one process to the others of a group."""

    def __init__(
        self,
        rank: int,
        size: int,
        share: Callable[[bytes | None], bytes],
        library: Any = None,
    ) -> None:
        """share: is given the group's id by rank 0, and gives it to the others. Blocks until all
        are there. Raises ``NcclError``.

        Without NVLink multicast unless the user has set it: the switches have few slots for it, for
        all processes together, and a group that gets none fails (nccl issue 2077, NCCL 2.29).
        """
        os.environ.setdefault(MULTICAST, "0")
        self.rank, self.size = rank, size
        self._library = library or load_nccl()
        self._handle = ctypes.c_void_p()
        unique = _UniqueId()
        if rank == 0:
            self._check(self._library.ncclGetUniqueId(ctypes.byref(unique)), "ncclGetUniqueId")
            share(bytes(unique))
        else:
            ctypes.memmove(ctypes.byref(unique), share(None), UNIQUE_ID_BYTES)
        self._check(
            self._library.ncclCommInitRank(ctypes.byref(self._handle), size, unique, rank),
            "ncclCommInitRank",
        )

    def sum(self, x: Tensor) -> None:
        """Put the sum over all ranks into ``x``."""
        self._call("ncclAllReduce", x, x, _SUM)

    def gather(self, x: Tensor, out: Tensor) -> None:
        """Put ``x`` of every rank into ``out`` [size, ...], in their order."""
        self._call("ncclAllGather", x, out)

    def broadcast(self, x: Tensor) -> None:
        """Overwrite ``x`` with that of rank 0."""
        self._call("ncclBroadcast", x, x, 0)

    def send(self, x: Tensor, rank: int) -> None:
        self._check(
            self._library.ncclSend(
                _pointer(x), ctypes.c_size_t(x.numel()), _TYPES[x.dtype], rank, self._handle,
                _stream(),
            ),
            "ncclSend",
        )  # fmt: skip

    def receive(self, x: Tensor, rank: int) -> None:
        self._check(
            self._library.ncclRecv(
                _pointer(x), ctypes.c_size_t(x.numel()), _TYPES[x.dtype], rank, self._handle,
                _stream(),
            ),
            "ncclRecv",
        )  # fmt: skip

    def abort(self) -> None:
        """End what is under way, on this device: whoever waits for it goes on, with results that
        mean nothing. May be called from any thread, once."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            self._library.ncclCommAbort(handle)

    def _call(self, name: str, x: Tensor, out: Tensor, *more: int) -> None:
        function = getattr(self._library, name)
        code = function(
            _pointer(x), _pointer(out), ctypes.c_size_t(x.numel()), _TYPES[x.dtype], *more,
            self._handle, _stream(),
        )  # fmt: skip
        self._check(code, name)

    def _check(self, code: int, name: str) -> None:
        if code not in (0, _IN_PROGRESS):
            said = self._library.ncclGetErrorString(code)
            reason = said.decode(errors="replace") if said else f"error {code}"
            raise NcclError(f"{name}: {reason} (rank {self.rank} of {self.size})")


def _pointer(x: Tensor) -> ctypes.c_void_p:
    if not x.is_contiguous():
        raise ValueError(f"a collective takes contiguous tensors, not strides {x.stride()}")
    return ctypes.c_void_p(x.data_ptr())


def _stream() -> ctypes.c_void_p:
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
    return ctypes.c_void_p(0 if stream is None else stream.cuda_stream)
