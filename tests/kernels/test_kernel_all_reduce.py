"""Sums over ranks in one kernel, against their reference. All ranks are in one process: before one
sums, its memory is given what the ranks behind it will send."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable

import pytest
import torch
from support.kernels.triton_device import DEVICE, DTYPES, ON_GPU, error, tolerance
from torch import Tensor

from penstock.kernels import all_reduce as reference
from penstock.kernels.gpu.all_reduce import (
    GAVE_UP,
    MOST_ROWS,
    SLOTS,
    STOP,
    PeerRows,
    all_reduce,
    all_reduce_add_norm,
    empty_word,
    memory_bytes,
    most_rows,
)

ROWS, WIDTH, LIMIT = 5, 48, 1 << 20
EPS = 1e-5
Call = Callable[[Tensor, PeerRows], Tensor]


class Host:
    """Ranks whose memory all of them reach."""

    def __init__(self, ranks: int, dtype: torch.dtype, limit: int = LIMIT) -> None:
        count = memory_bytes(ranks, ROWS, WIDTH, dtype) // 4
        shape = SLOTS, ranks, ROWS, WIDTH
        word = empty_word(dtype) - (1 << 32)
        self.memory = [
            torch.full((count,), word, dtype=torch.int32, device=DEVICE).view(dtype).view(shape)
            for _ in range(ranks)
        ]
        peers = tuple(each.data_ptr() for each in self.memory)
        self.ranks = [
            PeerRows(
                rank, peers, torch.zeros(ROWS, dtype=torch.int32, device=DEVICE),
                torch.zeros(2, dtype=torch.int32, pin_memory=ON_GPU), ROWS, WIDTH, dtype, limit,
            )
            for rank in range(ranks)
        ]  # fmt: skip

    def sums(self, parts: list[Tensor], call: Call, first: int = 0) -> list[Tensor]:
        """What the call gives each rank; first: the rank that sums first."""
        order = [(first + rank) % len(parts) for rank in range(len(parts))]
        assert self.is_empty(len(parts[0].view(-1, WIDTH)))
        found = {}
        for number, rank in enumerate(order):
            for behind in order[number + 1 :]:
                self._send(behind, rank, parts[behind])
            found[rank] = call(parts[rank], self.ranks[rank])
        return [found[rank] for rank in range(len(parts))]

    def is_empty(self, rows: int) -> bool:
        """Whether nothing waits for the next sum of so many rows."""
        bits = torch.int32 if self.memory[0].dtype.itemsize == 4 else torch.int16
        return all(
            bool((memory[turn, :, row].view(bits) == torch.iinfo(bits).min).all())
            for memory, shared in zip(self.memory, self.ranks, strict=True)
            for row, turn in enumerate(shared.turns[:rows].tolist())
        )

    def _send(self, rank: int, to: int, part: Tensor) -> None:
        for row, turn in enumerate(self.ranks[rank].turns[: len(part)].tolist()):
            self.memory[to][turn, rank, row] = part[row] + 0.0  # -0.0 + 0.0 is 0.0


def rows_of(ranks: int, rows: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for _ in range(ranks):
        part = torch.randn(rows, WIDTH, generator=generator)
        part[:, ::5] = -0.0
        parts.append(part.to(DEVICE, dtype))
    return parts


def summed(part: Tensor, shared: PeerRows) -> Tensor:
    out = torch.empty(part.shape[-2:], dtype=shared.dtype, device=DEVICE)
    all_reduce(part, out, shared)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_ranks_have_the_sum_in_the_order_of_ranks_whatever_sizes_follow_each_other(
    ranks: int, dtype: torch.dtype
) -> None:
    host = Host(ranks, dtype)
    for number, rows in enumerate([1, 4, 2, 2, ROWS, 1, 1, 3, ROWS, 1]):
        parts = rows_of(ranks, rows, dtype, number)
        wanted = reference.all_reduce(parts, torch.empty_like(parts[0]))
        for found in host.sums(parts, summed, first=number):
            assert torch.equal(found, wanted)


def test_a_sum_may_take_the_place_of_what_is_summed() -> None:
    parts = rows_of(2, 2, torch.float32, 1)
    wanted = reference.all_reduce(parts, torch.empty_like(parts[0]))

    def in_place(part: Tensor, shared: PeerRows) -> Tensor:
        copy = part.clone()
        all_reduce(copy, copy, shared)
        return copy

    for found in Host(2, torch.float32).sums(parts, in_place):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
def test_a_sum_is_added_to_the_residual_stream_and_normed(normed: bool, dtype: torch.dtype) -> None:
    host, generator = Host(2, dtype), torch.Generator().manual_seed(3)
    weight, x_weight = (torch.rand(WIDTH, generator=generator).to(DEVICE, dtype) for _ in range(2))
    of_x = x_weight if normed else None
    for number, rows in enumerate([2, ROWS, 1]):
        parts, (before, _) = rows_of(2, rows, dtype, number), rows_of(2, rows, dtype, 10 + number)
        wanted, out = before.clone(), torch.empty_like(before)
        reference.all_reduce_add_norm(parts, wanted, weight, EPS, out, of_x)

        def add(part: Tensor, shared: PeerRows, before: Tensor = before) -> Tensor:
            residual, normed = before.clone(), torch.empty_like(before)
            all_reduce_add_norm(part, residual, weight, EPS, normed, shared, of_x)
            return torch.stack((residual, normed))

        first, second = host.sums(parts, add)
        assert torch.equal(first, second)
        assert error(first[0], wanted) < tolerance(dtype)
        assert error(first[1], out) < tolerance(dtype)


def test_a_rank_may_give_parts_of_what_it_adds() -> None:
    host, generator = Host(2, torch.float32), torch.Generator().manual_seed(4)
    stacks = [torch.randn(3, 2, WIDTH, generator=generator).to(DEVICE) for _ in range(2)]
    whole = [stack[0] + stack[1] + stack[2] for stack in stacks]
    wanted = reference.all_reduce(whole, torch.empty_like(whole[0]))
    host._send(1, 0, whole[1])
    assert torch.equal(summed(stacks[0], host.ranks[0]), wanted)
    assert torch.equal(summed(stacks[1], host.ranks[1]), wanted)


def test_who_waits_for_a_rank_that_never_sends_gives_up() -> None:
    host = Host(2, torch.float32, limit=1024)
    summed(rows_of(1, 1, torch.float32, 1)[0], host.ranks[0])
    assert host.ranks[0].words.tolist() == [1, 1]


def test_who_waits_ends_when_the_host_says_so() -> None:
    host = Host(2, torch.float32)
    host.ranks[0].words[STOP] = 1
    summed(rows_of(1, 1, torch.float32, 1)[0], host.ranks[0])
    assert not host.ranks[0].words[GAVE_UP]


@pytest.mark.parametrize("shape", [(ROWS + 1, WIDTH), (1, WIDTH + 16)], ids=str)
def test_rows_that_the_ranks_share_no_memory_for_are_refused(shape: tuple[int, int]) -> None:
    x = torch.zeros(shape, device=DEVICE)
    with pytest.raises(ValueError, match=rf"up to {ROWS} rows of {WIDTH} torch.float32"):
        all_reduce(x, x, Host(2, torch.float32).ranks[0])


@pytest.mark.parametrize(
    ("num_bytes", "width", "dtype", "rows"),
    [
        (1 << 20, 4096, torch.bfloat16, 128),
        (1 << 18, 4096, torch.float32, 16),
        (1 << 20, 64, torch.bfloat16, MOST_ROWS),
        (1 << 12, 4096, torch.bfloat16, 0),
    ],
)
def test_a_sum_has_as_many_rows_as_its_bytes_allow_and_programs_run_at_a_time(
    num_bytes: int, width: int, dtype: torch.dtype, rows: int
) -> None:
    assert most_rows(num_bytes, width, dtype) == rows


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_ranks_wait_for_each_other_in_graphs_that_are_repeated() -> None:
    """Two ranks on two streams of one device."""
    host, rows = Host(2, torch.bfloat16, limit=1 << 24), 2
    parts = [part.clone() for part in rows_of(2, rows, torch.bfloat16, 1)]
    outs = [torch.empty_like(part) for part in parts]
    wrong = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    wanted = [reference.all_reduce(parts, torch.empty_like(parts[0])).clone() for _ in range(2)]
    graphs, streams = [], [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    gc.collect()  # graphs of other tests: one that goes while another is recorded spoils it

    def work(rank: int) -> None:
        parts[rank].neg_()
        wanted[rank].neg_()
        for count in (1, rows, 1):
            outs[rank].zero_()
            all_reduce(parts[rank][:count], outs[rank][:count], host.ranks[rank])
            wrong[rank].add_((outs[rank][:count] != wanted[rank][:count]).sum())

    for rank in range(2):
        all_reduce(parts[rank][:0], outs[rank][:0], host.ranks[rank])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work(rank)
        graphs.append(graph)
    for _, rank in itertools.product(range(300), range(2)):
        with torch.cuda.stream(streams[rank]):
            graphs[rank].replay()
    torch.cuda.synchronize()
    assert [shared.words.tolist() for shared in host.ranks] == [[0, 0]] * 2
    assert wrong.tolist() == [0, 0]
