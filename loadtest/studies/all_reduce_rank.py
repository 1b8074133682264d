"""What one rank of ``all_reduce`` does: all ranks call the same in the same order."""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from penstock.kernels.all_reduce import all_reduce as reference
from penstock.kernels.all_reduce import all_reduce_add_norm as reference_add_norm
from penstock.kernels.gpu.all_reduce import all_reduce, all_reduce_add_norm
from penstock.kernels.gpu.norm import add_rms_norm
from penstock.services.worker.gpu.device_ranks import communicator
from penstock.services.worker.gpu.nccl import Communicator
from penstock.services.worker.gpu.one_shot import OneShotSums, connect_one_shot
from penstock.services.worker.models.rank_shares import place_of

dist: Any = torch.distributed
Work = Callable[[], object]
Behind = tuple[Tensor, Tensor, float, Tensor]
WIDTH_BYTES = 8192
"""Of a row: 4,096 numbers of 16 bits, or 2,048 of 32."""
_TYPES = (torch.bfloat16, torch.float32)
_EPS = 1e-6
_CALLS, _REPLAYS = 20, 50
_LATE_CYCLES = 40_000
_NEW_EVERY = 100


class StoreMeeting:
    """See ``rank_group.Meeting``."""

    def __init__(self, name: str, store: Any) -> None:
        self.name, self._store = name, store

    def store(self, limit: datetime.timedelta) -> Any:
        return self._store

    def interface(self) -> str:
        return "127.0.0.1"

    def links(self) -> None:
        return None


def measure(rank: int, ranks: int, port: int, most_bytes: int, repeats: int) -> dict[str, Any]:
    """Compare and time sums. most_bytes: of the largest; repeats: of the graph that is compared."""
    limit = datetime.timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, None, rank == 0, limit, wait_for_workers=False)
    torch.cuda.set_device(0)
    group = communicator(store, "nccl", rank, ranks)
    found: dict[str, Any] = {
        "ranks": ranks, "device": torch.cuda.get_device_name(), "why_not": "", "compared": 0,
        "wrong": 0, "from_nccl": 0.0, "times": [],
    }  # fmt: skip
    with torch.inference_mode():
        for dtype in _TYPES:
            like = torch.zeros(1, WIDTH_BYTES // dtype.itemsize, dtype=dtype, device="cuda")
            meeting = StoreMeeting(str(dtype), store)
            sums = connect_one_shot(meeting, place_of(rank, ranks, 1), like, most_bytes)
            if isinstance(sums, str):
                return {**found, "why_not": sums}
            one = _Rank(rank, group, sums)
            one.compare(found, repeats)
            one.time(found)
        found["look_ns"], found["stop_us"] = one.end(store)
    return found


class _Rank:
    """The sums of one type."""

    def __init__(self, rank: int, group: Communicator, sums: OneShotSums) -> None:
        self._rank, self._group, self._sums = rank, group, sums
        self._shared = shared = sums.shared
        self._sizes = [1 << bit for bit in range(shared.rows.bit_length())]
        shape = shared.rows, shared.width
        self._x, self._out, self._residual, self._normed = (
            torch.zeros(shape, dtype=shared.dtype, device="cuda") for _ in range(4)
        )
        alike = torch.Generator("cuda").manual_seed(5)
        self._weight = torch.rand(shared.width, generator=alike, device="cuda").to(shared.dtype)

    def compare(self, found: dict[str, Any], repeats: int) -> None:
        """Repeat a graph of sums of all sizes, whose rows change their sign each time."""
        wanted, wrong = torch.zeros_like(self._out), torch.zeros((), dtype=torch.int64).cuda()

        def sums() -> None:
            self._x.neg_()
            wanted.neg_()
            for rows in self._sizes[::2] + self._sizes[::-1]:
                self._out[:rows].zero_()
                all_reduce(self._x[:rows], self._out[:rows], self._shared)
                wrong.add_((self._out[:rows] != wanted[:rows]).sum())

        graph, late = _recorded(sums, 1), random.Random(self._rank)
        for number in range(repeats):
            if number % _NEW_EVERY == 0:
                self._new_rows(found, wanted)
            if late.random() < 0.5:
                torch.cuda._sleep(late.randrange(_LATE_CYCLES))  # type: ignore[no-untyped-call]
            graph.replay()
        counted = sum(self._sizes[::2] + self._sizes) * self._shared.width
        found["compared"] += repeats * counted
        found["wrong"] += int(wrong.item()) + self._wrong_norms()
        found["wrong"] += int(self._sums.gave_up)

    def _new_rows(self, found: dict[str, Any], wanted: Tensor) -> None:
        self._x.normal_()
        self._x[:, ::7] = -0.0
        parts = self._gathered(self._x)
        reference(parts.unbind(), wanted)
        by_nccl = self._x.clone()
        self._group.sum(by_nccl)
        apart = (by_nccl.float() - wanted.float()).abs().max() / wanted.float().abs().max()
        found["from_nccl"] = max(found["from_nccl"], float(apart))

    def _gathered(self, x: Tensor) -> Tensor:
        parts = x.new_empty(self._group.size, *x.shape)
        self._group.gather(x, parts)
        return parts

    def _wrong_norms(self) -> int:
        """Values of sums with norms that differ between ranks, or from the reference."""
        wrong = 0
        for x_weight in (None, self._weight):
            self._x.normal_()
            alike = torch.Generator("cuda").manual_seed(7)
            self._residual.normal_(generator=alike)
            residual, normed = self._residual.clone(), torch.empty_like(self._normed)
            all_reduce_add_norm(self._x, self._residual, self._weight, _EPS, self._normed,
                                self._shared, x_weight)  # fmt: skip
            parts = self._gathered(self._x).unbind()
            reference_add_norm(parts, residual, self._weight, _EPS, normed, x_weight)
            close = 1e-2 if self._shared.dtype == torch.bfloat16 else 1e-5
            for mine, other in ((self._residual, residual), (self._normed, normed)):
                all_ranks = self._gathered(mine)
                wrong += int((all_ranks != all_ranks[0]).sum())
                apart = (mine.float() - other.float()).abs()
                wrong += int((apart > close * (1.0 + other.float().abs())).sum())
        return wrong

    def time(self, found: dict[str, Any]) -> None:
        """Microseconds of a call, in graphs of ``_CALLS``."""
        for values in (self._x, self._residual):
            values.zero_()
        for rows in self._sizes:
            x, out = self._x[:rows], self._out[:rows]
            residual, normed = self._residual[:rows], self._normed[:rows]
            behind = residual, self._weight, _EPS, normed

            def unfused(x: Tensor = x, behind: Behind = behind) -> None:
                self._group.sum(x)
                add_rms_norm(x, *behind)

            calls: dict[str, Work] = {
                "one_shot_us": partial(all_reduce, x, out, self._shared),
                "nccl_us": partial(self._group.sum, x),
                "fused_us": partial(all_reduce_add_norm, x, *behind, self._shared),
                "nccl_and_norm_us": unfused,
            }
            times = {name: round(_microseconds(call), 2) for name, call in calls.items()}
            found["times"].append(
                {"dtype": str(self._shared.dtype).removeprefix("torch."), "rows": rows,
                 "bytes": x.numel() * x.element_size(), **times}
            )  # fmt: skip

    def end(self, store: Any) -> tuple[float, float]:
        """Sums that no other rank answers: nanoseconds of a look of the first rank until it gives
        up, and microseconds until it ends because the host says so. Nothing can be summed after."""
        looks, row = 1 << 17, self._x[:1]
        look_ns = stop_us = 0.0
        if self._rank == 0:
            torch.cuda.synchronize()
            began = time.perf_counter()
            all_reduce(row, self._out[:1], self._shared._replace(limit=looks))
            torch.cuda.synchronize()
            look_ns = (time.perf_counter() - began) / looks * 1e9
            if not self._sums.gave_up:
                raise RuntimeError("a sum that nobody answered did not give up")
            self._shared.words.zero_()
            all_reduce(row, self._out[:1], self._shared)
            time.sleep(0.1)
            began = time.perf_counter()
            self._sums.stop()
            torch.cuda.synchronize()
            stop_us = (time.perf_counter() - began) * 1e6
            store.set("over", "1")
        store.get("over")
        return look_ns, stop_us


def _recorded(work: Work, calls: int) -> torch.cuda.CUDAGraph:
    """``work`` several times in a row; run once before, since the first call compiles."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            work()
    return graph


def _microseconds(work: Work) -> float:
    graph = _recorded(work, _CALLS)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for _ in range(5):
        graph.replay()
    begin.record()
    for _ in range(_REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / (_CALLS * _REPLAYS)
