"""Reads many tensors at once: a few threads, each taking the next piece of some tensor.

A piece whose target has the stored type and is contiguous host memory is read straight into it;
any other goes through a scratch buffer of the thread. For a GPU the buffers are pinned, several a
thread: while one is copied, the next piece is read into another. They are pinned by a thread of
its own, which may begin before there is anything to read. ``preadv`` and the copies release the
interpreter's lock. Memory beside the weights is bounded by ``threads`` times ``BUFFERS`` pieces.

Plain reads, not mappings: a file that shrinks while it is read gives an error, not a SIGBUS.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.protocol.model_info import BadModelFolder
from penstock.services.worker.direct_copy import DirectCopies
from penstock.services.worker.gguf_file import BLOCKS
from penstock.services.worker.load_report import ReadProgress

DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
    "I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.uint8, **dict.fromkeys(BLOCKS, torch.uint8),
}  # fmt: skip
"""The stored types, as safetensors files name them."""
THREADS = max(4, min(8, (os.cpu_count() or 1) // 2))
"""Eight read as fast from the page cache as an H200's link takes it."""
BUFFERS = 2
"""Pinned buffers of a thread."""
PIECE_BYTES = 4 * 1024 * 1024
"""Read at once. A power of two: torch rounds pinned memory up to one. Larger ones do not fit the
processor's cache together, smaller ones cost the interpreter more."""
REPORT_SECONDS = 0.1
_ZEROS = bytes(64 * 1024)


class TensorRead(NamedTuple):
    """One tensor: where its bytes lie, and where its values go."""

    name: str
    path: Path
    begin: int
    """Offset in the file."""
    dtype: torch.dtype
    """The stored type."""
    target: Tensor
    """Same shape; any type, layout and device."""
    pitch: int = 0
    """Bytes from the beginning of one row to that of the next, where others lie between them; 0:
    nothing does."""


class StoredSlice(NamedTuple):
    """Values of a stored tensor, and where they go."""

    name: str
    target: Tensor
    row: int = 0
    """The first row in the stored tensor, …"""
    column: int = 0
    """… and the first column; whole rows where they are as long as the target's."""

    def of(self, stored: Tensor) -> Tensor:
        """The values, of the whole tensor."""
        rows = stored[self.row : self.row + len(self.target)]
        if self.target.dim() < 2:
            return rows
        return rows[:, self.column : self.column + self.target.shape[1]]


class _Piece(NamedTuple):
    read: TensorRead
    rows: Tensor
    """The part of the target that this piece fills."""
    begin: int
    size: int
    """Bytes of it in the file …"""
    stretch: int
    """… of which so many at a time lie in one piece."""


def _pieces(read: TensorRead, piece_bytes: int) -> Iterator[_Piece]:
    """Cut a tensor along its first dimension, anywhere if it is contiguous here and there."""
    target = read.target
    if not target.dim():
        target = target.view(1)
    flat = target.view(-1) if target.is_contiguous() and not read.pitch else target
    if not target.numel():
        return
    row = flat[0].numel() * read.dtype.itemsize
    count = max(1, piece_bytes // row)
    for first in range(0, len(flat), count):
        rows = flat[first : first + count]
        size = len(rows) * row
        begin = read.begin + first * (read.pitch or row)
        yield _Piece(read, rows, begin, size, row if read.pitch else size)


class _Stage(Protocol):
    """Scratch memory between file and target, for one thread."""

    def copy(self, piece: _Piece, fill: Callable[[memoryview], None]) -> None:
        """Let ``fill`` read the piece into the scratch memory, and copy it to the target."""

    def finish(self) -> None:
        """Wait until every copy is done."""


class _HostStage:
    """For the CPU: converts types and layouts."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def copy(self, piece: _Piece, fill: Callable[[memoryview], None]) -> None:
        if len(self._buffer) < piece.size:
            self._buffer = torch.empty(piece.size, dtype=torch.uint8)
        stored = self._buffer[: piece.size]
        fill(_memory(stored))
        piece.rows.copy_(stored.view(piece.read.dtype).view(piece.rows.shape))

    def finish(self) -> None:
        pass


class PinnedBuffers:
    """Pinned buffers of a piece each, taken one after the other by a thread of its own."""

    def __init__(self, total_bytes: int, pin: Callable[[int], Tensor] | None = None) -> None:
        """Make as many as ``THREADS`` use, or as hold ``total_bytes``. pin: takes so many bytes."""
        self._left = min(THREADS * BUFFERS, -(-total_bytes // PIECE_BYTES))
        self._pin = pin or _pinned
        self._lock = threading.Lock()
        self._ready: SimpleQueue[Tensor | BaseException] = SimpleQueue()
        if self._left:
            # A daemon: nobody waits for it if the checkpoint turns out to be bad.
            threading.Thread(
                target=self._fill, args=(self._left,), name="pinning", daemon=True
            ).start()

    def _fill(self, count: int) -> None:
        for _ in range(count):
            try:
                self._ready.put(self._pin(PIECE_BYTES))
            except BaseException as error:
                self._ready.put(error)

    def take(self) -> Tensor:
        """The next one, uint8; past the last one, memory that is pinned now. Raises what pinning
        it raised."""
        with self._lock:
            self._left -= 1
            some_left = self._left >= 0
        found = self._ready.get() if some_left else self._pin(PIECE_BYTES)
        if isinstance(found, BaseException):
            raise found
        return found


def _pinned(size: int) -> Tensor:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class _TorchCopies:
    """As ``DirectCopies``, where the CUDA runtime cannot be called: torch does the copying."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        self._event.record(self._stream)

    def wait(self) -> None:
        self._event.synchronize()


class _PinnedStage:
    """For a GPU: pinned buffers in turn, copied on a stream of the thread's own."""

    def __init__(self, device: torch.device, buffers: PinnedBuffers) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The targets' memory may have been something else's, in work that is still queued.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        # For good, not piece by piece: the thread does nothing else.
        torch.cuda.set_stream(self._stream)
        self._direct = DirectCopies.possible()
        self._source = buffers
        self._buffers: list[Tensor] = []
        self._memory: list[memoryview] = []
        self._copied: list[DirectCopies | _TorchCopies] = []
        self._turn = 0

    def copy(self, piece: _Piece, fill: Callable[[memoryview], None]) -> None:
        turn = self._turn
        self._turn = (turn + 1) % BUFFERS
        if turn == len(self._buffers):
            self._buffers.append(self._source.take())
            self._memory.append(_memory(self._buffers[turn]))
            handle = self._stream.cuda_stream
            made = DirectCopies(handle) if self._direct else _TorchCopies(self._stream)
            self._copied.append(made)
        copies = self._copied[turn]
        copies.wait()
        if len(self._buffers[turn]) < piece.size:  # a row that is longer than a piece
            self._buffers[turn] = _pinned(piece.size)
            self._memory[turn] = _memory(self._buffers[turn])
        buffer, rows = self._buffers[turn], piece.rows
        fill(self._memory[turn][: piece.size])
        same = rows.dtype == piece.read.dtype and rows.is_contiguous()
        if same and isinstance(copies, DirectCopies):
            copies.copy(rows.data_ptr(), buffer.data_ptr(), piece.size)
        else:
            values = buffer[: piece.size].view(piece.read.dtype).view(rows.shape)
            rows.copy_(values, non_blocking=True)
        copies.mark()

    def finish(self) -> None:
        self._stream.synchronize()


def _memory(values: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU."""
    view: memoryview = values.view(torch.uint8).numpy().data
    return view


def all_zero(data: memoryview) -> bool:
    """Whether every byte is zero; of ordinary weights it looks at the first few only."""
    first = bytes(data[:1024])
    return first == _ZEROS[: len(first)] and all(
        bytes(part) == _ZEROS[: len(part)]
        for part in (data[at : at + len(_ZEROS)] for at in range(0, len(data), len(_ZEROS)))
    )


class WeightReader:
    """Reads tensors into their targets; ``zero_tensors`` then names those that are all zeros."""

    def __init__(self, reads: Sequence[TensorRead], buffers: PinnedBuffers | None = None) -> None:
        """Sorted by file and offset here: a disk likes to be read in order. buffers: for targets
        on a GPU; by default taken when they are needed."""
        ordered = sorted(reads, key=lambda read: (read.path, read.begin))
        self._reads = ordered
        self._pieces = deque(piece for read in ordered for piece in _pieces(read, PIECE_BYTES))
        self.total_bytes = sum(piece.size for piece in self._pieces)
        self._nonzero: set[str] = set()
        self._done: list[int] = []
        """Bytes that each thread has read."""
        self._failure: BaseException | None = None
        self._buffers = buffers or PinnedBuffers(0)

    @property
    def zero_tensors(self) -> list[str]:
        return [
            name
            for name in dict.fromkeys(read.name for read in self._reads if read.target.numel())
            if name not in self._nonzero
        ]

    def run(self, progress: Callable[[ReadProgress], None], threads: int = THREADS) -> float:
        """Read everything; ``progress`` is told every tenth of a second. Returns the seconds.

        Raises ``BadModelFolder`` that names file and tensor when a file cannot be read or ends
        too early.
        """
        began = time.perf_counter()
        count = max(1, min(threads, len(self._pieces)))
        self._done = [0] * count
        # Daemons: a worker told to stop while it loads does not wait for the rest of the files.
        workers = [
            threading.Thread(target=self._work, args=(i,), name=f"weights {i}", daemon=True)
            for i in range(count)
        ]
        for worker in workers:
            worker.start()
        try:
            for worker in workers:
                while worker.is_alive():
                    progress(self._progress(began))
                    worker.join(REPORT_SECONDS)
        finally:
            self._pieces.clear()
            for worker in workers:
                worker.join()
        if self._failure is not None:
            raise self._failure
        progress(self._progress(began))
        return time.perf_counter() - began

    def _progress(self, began: float) -> ReadProgress:
        return ReadProgress(sum(self._done), self.total_bytes, time.perf_counter() - began)

    def _work(self, number: int) -> None:
        """One thread: the next piece until there is none, or until some thread fails."""
        stages: dict[torch.device, _Stage] = {}
        try:
            with torch.inference_mode(), contextlib.closing(_OpenFile()) as file:
                while self._failure is None and self._pieces:
                    try:
                        piece = self._pieces.popleft()
                    except IndexError:  # another thread took the last one
                        break
                    self._read(file, piece, stages)
                    self._done[number] += piece.size
                for stage in stages.values():
                    stage.finish()
        except BaseException as error:
            self._failure = self._failure or error

    def _read(self, file: _OpenFile, piece: _Piece, stages: dict[torch.device, _Stage]) -> None:
        def fill(memory: memoryview) -> None:
            file.read(piece, memory)
            if piece.read.name not in self._nonzero and not all_zero(memory):
                self._nonzero.add(piece.read.name)

        rows = piece.rows
        if rows.device.type == "cpu" and rows.dtype == piece.read.dtype and rows.is_contiguous():
            fill(_memory(rows.view(-1)))
            return
        stage = stages.get(rows.device)
        if stage is None:
            on_host = rows.device.type == "cpu"
            stage = _HostStage() if on_host else _PinnedStage(rows.device, self._buffers)
            stages[rows.device] = stage
        stage.copy(piece, fill)


class _OpenFile:
    """The file that a thread reads at the moment: pieces come in the files' order."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._descriptor = -1

    def read(self, piece: _Piece, memory: memoryview) -> None:
        """Fill ``memory``. Raises ``BadModelFolder``."""
        path = piece.read.path
        try:
            if path != self._path:
                self.close()
                self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._path = path
            for number, first in enumerate(range(0, len(memory), piece.stretch)):
                stretch = memory[first : first + piece.stretch]
                self._fill(piece, stretch, piece.begin + number * piece.read.pitch)
        except OSError as error:
            raise BadModelFolder(
                f"{path}: tensor {piece.read.name!r} cannot be read: {error.strerror or error}"
            ) from None

    def _fill(self, piece: _Piece, memory: memoryview, begin: int) -> None:
        done = 0
        while done < len(memory):
            count = os.preadv(self._descriptor, [memory[done:]], begin + done)
            if not count:
                raise BadModelFolder(
                    f"{piece.read.path}: truncated while tensor {piece.read.name!r} was read"
                )
            done += count

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._path = -1, None
