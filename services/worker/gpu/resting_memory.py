"""Weights and KV memory that leave a GPU and come back to the same addresses.

Kernels, recorded graphs and tensors hold addresses. These stay reserved while the memory behind
them is the driver's again; weights lie in pinned memory of the host meanwhile, from which the
device copies them itself. They do not change, so they are copied there once.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from penstock.protocol.config.machine import free_host_bytes

if TYPE_CHECKING:
    from penstock.services.worker.gpu.held_memory import Driver

FREE_SECONDS = 5.0
"""So long the memory may still be that of a model that has just left it."""
_AGAIN_SECONDS = 0.02
_HUGE_PAGE = 2 << 20


class LeavingPiece(Protocol):
    """Memory of a device whose addresses outlive it."""

    memory: Tensor
    """uint8 [bytes]."""

    def give_back(self) -> None:
        """Nothing lies behind the addresses any more, and nothing may be computing with them. The
        memory is free once its descriptors are closed. Raises ``RuntimeError``."""

    def take_again(self) -> int:
        """Have new memory at the same addresses, to write to; its content means nothing. Returns a
        descriptor of it, the caller's to close. Raises ``RuntimeError``."""

    def protect(self) -> None:
        """Nobody writes any more."""


class RestingMemory:
    """Of one worker."""

    def __init__(
        self,
        weights: Sequence[LeavingPiece],
        kv: LeavingPiece | None,
        pinned: Callable[[int], Tensor],
        free: Callable[[], None] = torch.cuda.empty_cache,
        synchronize: Callable[[], None] = torch.cuda.synchronize,
    ) -> None:
        """kv: its content is not kept; pinned: makes uint8 [bytes] of the host's memory; free:
        gives back what torch's allocator does not use."""
        self._weights, self._kv, self._free = weights, kv, free
        self._pinned, self._synchronize = pinned, synchronize
        self._host: list[Tensor] = []
        """What each piece of weights has; empty: they have not left yet."""

    def leave(self) -> None:
        """Raises ``RuntimeError`` and ``OSError``; the memory is then where it was, unless the
        driver refuses to take it."""
        self._synchronize()  # which also gives this thread the device's context
        with torch.inference_mode():
            if not self._host:
                self._copy()
            for piece in self._all():
                piece.give_back()
            self._free()

    def come_back(self) -> list[int]:
        """Descriptors of the memory, of KV memory last. Raises ``RuntimeError`` where there is none
        left: then this process can compute nothing any more."""
        self._synchronize()
        found = []
        until = time.monotonic() + FREE_SECONDS
        with torch.inference_mode():
            for piece, host in zip(self._weights, self._host, strict=True):
                found.append(_taken(piece, until))
                piece.memory.copy_(host, non_blocking=True)
            if self._kv is not None:
                found.append(_taken(self._kv, until))
                self._kv.memory.zero_()
            self._synchronize()
        for piece in self._weights:
            piece.protect()
        return found

    def _all(self) -> Sequence[LeavingPiece]:
        return [*self._weights, *(() if self._kv is None else (self._kv,))]

    def _copy(self) -> None:
        left = self._pinned(sum(len(piece.memory) for piece in self._weights))
        host = []
        for piece in self._weights:
            place, left = left[: len(piece.memory)], left[len(piece.memory) :]
            host.append(place.copy_(piece.memory, non_blocking=True))
        self._synchronize()
        self._host = host


def _taken(piece: LeavingPiece, until: float) -> int:
    """Waits for memory that another process is about to give back."""
    while True:
        try:
            return piece.take_again()
        except RuntimeError:
            if time.monotonic() > until:
                raise
        time.sleep(_AGAIN_SECONDS)


def pinned_memory(driver: Driver, num_bytes: int) -> Tensor:
    """uint8 [bytes] of the host, which stays until the process ends. In large pages where the
    system has them: it is pinned page by page. Raises ``OSError`` and ``RuntimeError``."""
    if num_bytes > (free := free_host_bytes()):
        raise RuntimeError(
            f"{num_bytes} bytes of weights do not fit into the host's memory, of which {free} are "
            "free; use --sleep-level 2"
        )
    pages = mmap.mmap(-1, -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE)
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    memory.fill_(0)  # by several threads, where the driver takes page after page
    driver(
        "cuMemHostRegister_v2", ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(len(memory)),
        ctypes.c_uint(0),
    )  # fmt: skip
    return memory[:num_bytes]
