"""Tensors read by several threads land in their places, whatever type and layout is wanted."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.protocol.model_info import BadModelFolder
from penstock.services.worker import weight_reading
from penstock.services.worker.load_report import LoadReport, ReadProgress
from penstock.services.worker.weight_reading import (
    BUFFERS,
    THREADS,
    PinnedBuffers,
    TensorRead,
    WeightReader,
    all_zero,
)

PIECE = 1000
"""Bytes; odd on purpose beside the shapes below."""


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_reading, "PIECE_BYTES", PIECE)


def stored(path: Path, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    """Random tensors, written one after the other from byte 3 on."""
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    with path.open("wb") as file:
        file.write(b"abc")
        for tensor in tensors:
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return tensors


def reads(path: Path, tensors: list[Tensor], targets: list[Tensor]) -> list[TensorRead]:
    found, begin = [], 3
    for number, (tensor, target) in enumerate(zip(tensors, targets, strict=True)):
        found.append(TensorRead(f"t{number}", path, begin, tensor.dtype, target))
        begin += tensor.numel() * tensor.itemsize
    return found


SHAPES: list[tuple[int, ...]] = [(7, 300), (1,), (), (0, 5), (301,), (3, 5, 40), (2, 2000)]
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def silent(progress: ReadProgress) -> None:
    pass


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(
    ("source", "wanted"), list(itertools.product(TYPES, [torch.float32, torch.bfloat16]))
)
def test_every_value_arrives(
    source: torch.dtype, wanted: torch.dtype, threads: int, tmp_path: Path
) -> None:
    tensors = stored(tmp_path / "w", SHAPES, source)
    targets = [torch.full(shape, 7.0, dtype=wanted) for shape in SHAPES]
    reader = WeightReader(reads(tmp_path / "w", tensors, targets))
    reader.run(silent, threads)
    for tensor, target in zip(tensors, targets, strict=True):
        assert torch.equal(target, tensor.to(wanted))
    assert reader.zero_tensors == []
    assert reader.total_bytes == sum(tensor.numel() * tensor.itemsize for tensor in tensors)


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_parts_of_fused_and_transposed_weights_are_filled_and_nothing_else(
    wanted: torch.dtype, tmp_path: Path
) -> None:
    tensors = stored(tmp_path / "w", [(40, 70), (24, 70), (50, 30)], torch.float32)
    fused = torch.full((80, 70), 7.0, dtype=wanted)
    transposed = torch.full((30, 60), 7.0, dtype=wanted)
    targets = [fused[8:48], fused[48:72], transposed[:, 5:55].t()]
    WeightReader(reads(tmp_path / "w", tensors, targets)).run(silent, 3)
    first, second, third = (tensor.to(wanted) for tensor in tensors)
    assert torch.equal(fused[8:72], torch.cat([first, second]))
    assert torch.equal(transposed[:, 5:55], third.t())
    assert (fused[:8] == 7).all() and (fused[72:] == 7).all()
    assert (transposed[:, :5] == 7).all() and (transposed[:, 55:] == 7).all()


def test_tensors_of_many_files_are_read_by_few_threads(tmp_path: Path) -> None:
    wanted: list[Tensor] = []
    found: list[TensorRead] = []
    for number in range(20):
        path = tmp_path / str(number)
        tensors = stored(path, [(number + 1, 90), (500,)], torch.float32)
        wanted += tensors
        found += [
            read._replace(name=f"{number} {read.name}")
            for read in reads(path, tensors, [torch.zeros_like(t) for t in tensors])
        ]
    WeightReader(found[::-1]).run(silent, 4)
    assert all(torch.equal(read.target, t) for read, t in zip(found, wanted, strict=True))


def test_only_what_is_zero_throughout_is_called_zero(tmp_path: Path) -> None:
    tensors = [torch.zeros(600), torch.zeros(900), torch.zeros(600), torch.zeros(5), torch.ones(2)]
    tensors[1][-1] = 1e-30
    tensors[2][400] = -0.0  # not a zero byte: somebody computed it
    (tmp_path / "w").write_bytes(b"abc" + b"".join(t.numpy().tobytes() for t in tensors))
    targets = [torch.ones_like(t) for t in tensors]
    reader = WeightReader(reads(tmp_path / "w", tensors, targets))
    reader.run(silent)
    assert reader.zero_tensors == ["t0", "t3"]
    assert all(torch.equal(target, t) for target, t in zip(targets, tensors, strict=True))


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 65_536, 200_000])
def test_a_single_byte_makes_a_difference(size: int) -> None:
    data = bytearray(size)
    assert all_zero(memoryview(data))
    for at in {0, size // 2, size - 1} if size else set():
        data[at] = 1
        assert not all_zero(memoryview(data))
        data[at] = 0


def test_a_file_that_ends_too_early_is_named_and_every_thread_ends(tmp_path: Path) -> None:
    tensors = stored(tmp_path / "w", [(100, 100), (100, 100)], torch.float32)
    with (tmp_path / "w").open("r+b") as file:
        file.truncate(60_000)
    before = threading.active_count()
    targets = [torch.empty_like(t) for t in tensors]
    with pytest.raises(BadModelFolder, match=r"/w: truncated while tensor 't1' was read"):
        WeightReader(reads(tmp_path / "w", tensors, targets)).run(silent, 4)
    assert threading.active_count() == before


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    read = TensorRead("t", tmp_path / "gone", 0, torch.float32, torch.empty(4))
    with pytest.raises(BadModelFolder, match="gone: tensor 't' cannot be read: No such file"):
        WeightReader([read]).run(silent)


def test_progress_grows_to_the_whole(tmp_path: Path) -> None:
    tensors = stored(tmp_path / "w", [(100, 100)], torch.float32)
    seen: list[ReadProgress] = []
    WeightReader(reads(tmp_path / "w", tensors, [torch.empty(100, 100)])).run(seen.append, 2)
    done = [progress.done_bytes for progress in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1].total_bytes == 40_000


def test_nothing_to_read_is_no_fault() -> None:
    reader = WeightReader([])
    reader.run(silent)
    assert reader.total_bytes == 0


def test_progress_and_report_are_texts_for_people() -> None:
    assert (
        str(ReadProgress(540_000_000, 1_190_000_000, 0.5))
        == "reading weights 45%: 0.54 of 1.19 GB, 1.08 GB/s"
    )
    assert str(ReadProgress(0, 999, 0.0)) == "reading weights 0%: 0 of 999 B, 0 B/s"
    assert str(LoadReport(2_500_000, 0.5)) == "2.5 MB of weights in 0.5 s, 5.0 MB/s"


class Pinning:
    """Takes ordinary memory; only ``allowed`` times in the thread of ``PinnedBuffers``."""

    def __init__(self, allowed: int) -> None:
        self.allowed = threading.Semaphore(allowed)
        self.sizes: list[int] = []
        self.threads: list[str] = []

    def __call__(self, size: int) -> Tensor:
        if threading.current_thread().name == "pinning":
            self.allowed.acquire()
        self.sizes.append(size)
        self.threads.append(threading.current_thread().name)
        return torch.full((size,), len(self.sizes), dtype=torch.uint8)


def test_the_first_pinned_buffer_is_given_out_while_the_next_is_being_pinned() -> None:
    pinning = Pinning(1)
    buffers = PinnedBuffers(3 * PIECE, pinning)
    assert buffers.take()[0] == 1
    assert pinning.sizes == [PIECE]
    pinning.allowed.release(2)
    assert [int(buffers.take()[0]) for _ in range(2)] == [2, 3]
    assert [int(buffers.take()[0]) for _ in range(2)] == [4, 5], "past the last one: pinned now"


@pytest.mark.parametrize(
    ("total", "count"),
    [(0, 0), (1, 1), (2 * PIECE + 1, 3), (10**9, THREADS * BUFFERS)],
)
def test_no_more_is_pinned_than_a_checkpoint_fills(total: int, count: int) -> None:
    pinning = Pinning(10**6)
    buffers = PinnedBuffers(total, pinning)
    for _ in range(count + 1):
        buffers.take()
    assert pinning.sizes == [PIECE] * (count + 1)
    assert pinning.threads == ["pinning"] * count + ["MainThread"]


def test_memory_that_cannot_be_pinned_is_told_to_every_thread_that_wants_some() -> None:
    def fail(size: int) -> Tensor:
        raise MemoryError(f"{size} bytes")

    buffers = PinnedBuffers(2 * PIECE, fail)
    for _ in range(3):
        with pytest.raises(MemoryError, match="1000 bytes"):
            buffers.take()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pinned", [0, 4 * PIECE, 10**9])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("source", TYPES)
def test_every_value_arrives_on_a_gpu(
    source: torch.dtype, wanted: torch.dtype, pinned: int, tmp_path: Path
) -> None:
    shapes = [*SHAPES, (700, 300)]
    tensors = stored(tmp_path / "w", shapes, source)
    targets = [torch.full(shape, 7.0, dtype=wanted, device="cuda") for shape in shapes[:-1]]
    targets.append(torch.full((300, 700), 7.0, dtype=wanted, device="cuda").t())
    reader = WeightReader(reads(tmp_path / "w", tensors, targets), PinnedBuffers(pinned))
    reader.run(silent, 3)
    for tensor, target in zip(tensors, targets, strict=True):
        assert torch.equal(target.cpu(), tensor.to(wanted))
    assert reader.zero_tensors == []
