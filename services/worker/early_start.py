"""What a GPU needs at the start and no Python has to wait for, begun before torch is imported.

Importing torch keeps the interpreter busy for three seconds. Beside it, and without the
interpreter's lock, the driver makes the device's context (0.4 s), and Triton hashes its own files,
by which it finds compiled kernels again (0.4 s). Both are done once in a process: who needs them
later, torch and the first kernel, finds them there.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading


def begin_early() -> None:
    """Begin both in threads, where there is a driver. Whatever fails here fails again where it is
    needed, and is told there."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    threading.Thread(target=_make_context, args=(driver,), name="context", daemon=True).start()
    threading.Thread(target=_hash_triton, name="hash", daemon=True).start()


def _make_context(driver: ctypes.CDLL) -> None:
    """The primary context of the first device, which is the only one that CUDA shows here."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _hash_triton() -> None:
    with contextlib.suppress(Exception):
        from triton.runtime.cache import triton_key

        triton_key()
