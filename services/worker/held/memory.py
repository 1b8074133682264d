"""Memory behind file descriptors, which lives as long as one of them is open or it is mapped.

That of the host is a file without a name (``memfd_create``), sealed once it is written: nobody can
change it or make it shorter any more, who maps it, maps it for itself. Of a GPU see
``penstock.services.worker.gpu.held_memory``.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.services.worker.held.manifest import BadManifest, HeldPiece, HeldTensor

HOST = "host"
ALIGNMENT = 512
"""Of tensors, as in torch's allocator."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class Piece(Protocol):
    """Some memory in one stretch."""

    descriptor: int
    memory: Tensor
    """uint8 [bytes]; views of it keep the memory mapped."""

    def write(self, offset: int, tensor: Tensor) -> None:
        """Copy a contiguous tensor to a place."""

    def finish(self) -> int:
        """All is written: nobody writes any more, as far as the device can see to it. Returns
        ``HeldPiece.checksum``."""


class RestingMemory(Protocol):
    """Memory that leaves its device and comes back to the same addresses."""

    def leave(self) -> None:
        """Give it back, but for the addresses. Raises ``OSError`` and ``RuntimeError``."""

    def come_back(self) -> list[int]:
        """Returns descriptors of the memory that it has from then on, KV memory's last. Raises
        ``RuntimeError``."""


class AwaitedMemory(Protocol):
    """Memory at known addresses, which may still be another process's."""

    memory: Tensor
    """uint8 [bytes]. Something lies behind it from the start; its content means nothing, and no two
    places need be two, before ``receive``."""

    def withdraw(self) -> None:
        """Nothing lies behind it any more, until ``receive``. Nothing may be computing with it."""

    def receive(self) -> None:
        """Have the memory, zeros, from now on. Raises ``RuntimeError``."""


class HeldMemory(Protocol):
    """Of one device."""

    place: str
    """Names the device for all processes of the host."""
    piece_bytes: int
    """About so large are pieces: while weights are moved, one of them is in memory twice."""

    def make(self, num_bytes: int) -> Piece:
        """Raises ``OSError`` or ``RuntimeError`` where there is none."""

    def open(self, descriptor: int, piece: HeldPiece) -> Piece:
        """Map what another process has made. The descriptor stays the caller's. Raises as ``make``
        does, and ``BadManifest`` where it is not that, or not as it was."""

    def awaited(self, descriptor: int, num_bytes: int) -> AwaitedMemory:
        """Addresses for memory that another process has made, and may be writing to. Raises as
        ``open`` does."""

    def resting(
        self, pieces: Sequence[Piece], kv: Piece | AwaitedMemory | None
    ) -> RestingMemory | None:
        """What takes these off the device and back; ``None``: they are the host's anyway."""


class HostPiece:
    """See ``Piece``."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self.descriptor = descriptor
        # Private: whoever writes has a page of its own from then on.
        pages = mmap.mmap(descriptor, num_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        self.memory = torch.frombuffer(pages, dtype=torch.uint8)

    def write(self, offset: int, tensor: Tensor) -> None:
        # Into the file, which a private mapping shows while nobody has written into that.
        data: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
        done = 0
        while done < len(data):
            done += os.pwrite(self.descriptor, data[done:], offset + done)

    def finish(self) -> int:
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return 0


class HostMemory:
    """See ``HeldMemory``."""

    place = HOST
    piece_bytes = 1 << 62

    def make(self, num_bytes: int) -> HostPiece:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        descriptor = os.memfd_create("penstock-weights", flags)
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, num_bytes)
        return HostPiece(descriptor, num_bytes)

    def open(self, descriptor: int, piece: HeldPiece) -> HostPiece:
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError as error:
            raise BadManifest(f"a descriptor of something else: {error.strerror}") from None
        size = os.fstat(descriptor).st_size
        if seals != _SEALS or size != piece.num_bytes:
            raise BadManifest(f"memory of {size} bytes with seals {seals:#x}")
        return HostPiece(descriptor, size)

    def awaited(self, descriptor: int, num_bytes: int) -> AwaitedMemory:
        raise BadManifest("KV memory of the host is not held")

    def resting(self, pieces: Sequence[Piece], kv: Piece | AwaitedMemory | None) -> None:
        return None


def place_tensors(
    tensors: Sequence[Tensor], piece_bytes: int
) -> tuple[list[HeldTensor], list[int]]:
    """Where each lies, one behind the other, and the bytes of each piece. A tensor lies in one
    piece, also one that is larger."""
    placed, sizes = list[HeldTensor](), list[int]()
    for tensor in tensors:
        size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if not sizes or (sizes[-1] and sizes[-1] + size > piece_bytes):
            sizes.append(0)
        dtype = str(tensor.dtype).removeprefix("torch.")
        placed.append(HeldTensor(dtype, tuple(tensor.shape), len(sizes) - 1, sizes[-1]))
        sizes[-1] += size
    return placed, [max(size, ALIGNMENT) for size in sizes]


def view(placed: HeldTensor, pieces: Sequence[Piece]) -> Tensor:
    """A tensor in its place. Raises ``BadManifest`` where there is none such."""
    dtype = getattr(torch, placed.dtype, None)
    if not isinstance(dtype, torch.dtype) or not 0 <= placed.piece < len(pieces):
        raise BadManifest(f"a tensor of type {placed.dtype!r} in piece {placed.piece}")
    count = 1
    for size in placed.shape:
        if size < 0:
            raise BadManifest(f"a tensor of shape {placed.shape}")
        count *= size
    memory, begin = pieces[placed.piece].memory, placed.offset
    end = begin + count * dtype.itemsize
    if not 0 <= begin <= end <= len(memory) or begin % ALIGNMENT:
        raise BadManifest(f"a tensor at {begin} to {end} of {len(memory)} bytes")
    return memory[begin:end].view(dtype).view(placed.shape)


def move(
    memory: HeldMemory, tensors: Sequence[Tensor]
) -> tuple[list[HeldTensor], list[Piece], list[HeldPiece]]:
    """Let the tensors have their values in new memory from now on, piece after piece; what they had
    is given back. Returns where each is."""
    placed, sizes = place_tensors(tensors, memory.piece_bytes)
    pieces, held = list[Piece](), list[HeldPiece]()
    for number, size in enumerate(sizes):
        piece = memory.make(size)
        pieces.append(piece)
        own = [pair for pair in zip(tensors, placed, strict=True) if pair[1].piece == number]
        for tensor, place in own:
            piece.write(place.offset, tensor)
        checksum = piece.finish()
        for tensor, place in own:
            tensor.data = view(place, pieces)
        held.append(HeldPiece(size, checksum))
    return placed, pieces, held
