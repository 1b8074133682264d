"""Memory of a GPU that the other processes of the host reach with theirs: CUDA's interprocess
handles, called directly.

A process sees its own GPU alone (``visible_device``), and maps what others have on theirs all the
same. torch's symmetric memory refuses that, asks for groups of its own, and sets up NVLink
multicast, which is not wanted here. Signatures: CUDA driver API, ``cuda.h``.
"""

from __future__ import annotations

import ctypes
from typing import Any

HANDLE_BYTES = 64
_GRAIN = 2 << 20
"""The driver hands out parts of so many bytes: who shares less shares others' memory with it."""
_LAZY_PEER_ACCESS = 1


class PeerMemoryError(RuntimeError):
    """The driver refuses. Says what."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


class PeerMemory:
    """Memory of the current device, for the life of the process: others may be reading it."""

    def __init__(self, num_bytes: int, word: int, library: Any = None) -> None:
        """word: 32 bits, with which it is filled. Raises ``PeerMemoryError``."""
        self._driver = library or _load_driver()
        size = -(-num_bytes // _GRAIN) * _GRAIN
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self.address = address.value
        words = ctypes.c_size_t(size // 4)
        self._call("cuMemsetD32_v2", address, ctypes.c_uint(word), words)
        self._call("cuCtxSynchronize")

    def handle(self) -> bytes:
        """What another process of the host opens it by."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self.address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Address at which this device reaches another's memory. Raises ``PeerMemoryError``."""
        if len(handle) != HANDLE_BYTES:
            raise PeerMemoryError(f"a handle has {HANDLE_BYTES} bytes, not {len(handle)}")
        address = ctypes.c_uint64()
        given, access = _Handle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_PEER_ACCESS)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, access)
        return address.value

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            said = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(said))
            reason = said.value.decode(errors="replace") if said.value else "unknown"
            raise PeerMemoryError(f"{name}: {reason} ({code})")


def _load_driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as failure:
        raise PeerMemoryError(f"the CUDA driver cannot be loaded: {failure}") from None
