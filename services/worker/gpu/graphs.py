"""CUDA graphs of the step: a ladder of batch sizes for decode, of token counts for mixed steps.

A graph replays some hundred launches in one call, so the device never waits for Python. What
varies between steps lies in device memory, so the same graph serves every step of its size; rows
that a step does not have are padding. All graphs share one memory pool, and replay one after the
other on one stream.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Protocol

import torch

from penstock.kernels.gpu.few_rows_linear import MOST_ROWS
from penstock.kernels.gpu.prefill_attention import QUERY_TILE
from penstock.services.worker.gpu.chunk_rows import ChunkRows
from penstock.services.worker.gpu.drafted_rows import DraftedRows
from penstock.services.worker.gpu.graph_sizes import SPARE_TILES, GraphSizes, drafted_sizes
from penstock.services.worker.gpu.kernel_choice import short
from penstock.services.worker.gpu.step_decoder import StepDecoder

UNGRAPHED_UNIT = 128
"""Steps without a graph are padded to a multiple of so many rows, a tile of the products: of less
than that nothing is saved."""
ROW_UNITS = [4096, 512, 1024, 256, 256, 128]
"""What the scheduler is told of it, see ``StepShape.row_units``; not finer than ``MIXED_ROWS``. 556
tokens of prefill beside 14 decode rows take 16.2 ms, 498 take 13.8 (Qwen3-8B, H200)."""


def _padded(sizes: list[int], rows: int) -> int:
    """The least of ``sizes``, ascending, that has room for ``rows``."""
    at = bisect_left(sizes, rows)
    return sizes[at] if at < len(sizes) else rows


class Replayable(Protocol):
    """A piece of work that was recorded."""

    def replay(self) -> None: ...


Record = Callable[[Callable[[], None]], Replayable]
"""Calls the work once to record it; replaying repeats its launches with the same arguments."""


class StepGraphs:
    """Runs the parts of a step: as graphs where one was captured, else launch by launch."""

    def __init__(self, decoder: StepDecoder, chunks: ChunkRows) -> None:
        self.decoder = decoder
        self._chunks = chunks
        self._sizes: list[int] = []
        self._shared_steps: list[int] = []
        self._bodies: dict[int, Replayable] = {}
        self._shared: dict[int, Replayable] = {}
        self._heads: dict[int, Replayable] = {}
        """Logits alone."""
        self._heads_and_draws: dict[int, Replayable] = {}
        self._mixed: dict[tuple[int, int], Replayable] = {}
        self._mixed_sizes: list[int] = []
        self._decode_bounds: list[int] = []
        self._drafted_rows: DraftedRows | None = None
        self._drafted: dict[int, Replayable] = {}
        """Of steps with drafts, by their rows."""
        self.why_none = ""
        """Why steps are launched kernel by kernel although graphs were to be captured."""

    def run_padding(self, most: int) -> None:
        """Run every kernel once, on padding alone, for up to ``most`` decode rows.

        Padding rows read slot 0 at most and write nothing that a slot owns.
        """
        self.decoder.state.warm_up()
        sizes = self._sizes_of(most)
        for size in reversed(sizes.decode):
            if size <= MOST_ROWS or size == most or not size & (size - 1):
                self.decoder.body(size, size, None)
                self._head_and_draw(size)
        for size in sizes.shared:
            self.decoder.body(size, size, None, True)
        self.decoder.commit(1, 1)
        self._chunks.clear()
        self._chunks.num_tiles = 1
        for bound in sizes.bounds:
            self.decoder.body(self._chunks.max_rows, bound, self._chunks)
        for rows in self.decoder.row_classes:
            if rows < self._chunks.max_rows:
                self.decoder.body(rows, sizes.bounds[0], self._chunks)
        if self.decoder.widened_room[1]:
            self._chunks.fit = False
            self.decoder.body(self._chunks.max_rows, sizes.bounds[0], self._chunks)
            self._chunks.fit = True
        self.decoder.head_of_all(self._chunks.max_rows, 1)

    def _sizes_of(self, most: int) -> GraphSizes:
        return self.decoder.graph_sizes(most, self._chunks.max_rows)

    def capture(self, most: int) -> None:
        """Record every graph, for up to ``most`` decode rows; all kernels must have run once.

        Where the decoder's steps cannot be recorded there are none, and ``why_none`` says why.
        """
        torch.cuda.synchronize()
        self.why_none = self._why_not()
        if self.why_none:
            return
        try:
            self._capture(partial(self.make, most=most))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as failure:
            if not self.decoder.may_wait:
                raise
            self.why_none = f"capture failed: {short(failure)}"
            self._drop()

    def _why_not(self) -> str:
        """Whether a step waits for the device, which no graph can hold; empty if none does."""
        if not self.decoder.may_wait:
            return ""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "a prototype": capture fails on what it does not see
            torch.cuda.set_sync_debug_mode("error")
        try:
            self.decoder.body(1, 1, None)
            self._head_and_draw(1)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as failure:
            return f"a step waits for the device: {short(failure)}"
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return ""

    def _drop(self) -> None:
        for graphs in (self._bodies, self._shared, self._heads, self._heads_and_draws):
            graphs.clear()
        self._mixed.clear()
        self._sizes, self._shared_steps, self._mixed_sizes, self._decode_bounds = [], [], [], []
        torch.cuda.synchronize()

    def take_drafts(self, drafted: DraftedRows) -> None:
        """From now on there are steps with drafts. Runs their kernels, and records them if steps
        have graphs."""
        self._drafted_rows = drafted
        if drafted.tokens.is_cuda:
            for rows in reversed(self._drafted_sizes()):
                self.decoder.body(rows, 0, drafted)
            torch.cuda.synchronize()
            if self._bodies:
                self._capture(self.make_drafted)

    def _drafted_sizes(self) -> list[int]:
        most = 0 if self._drafted_rows is None else self._drafted_rows.most_rows
        return drafted_sizes(most)

    def make_drafted(self, record: Record) -> None:
        """Record the steps with drafts of every size."""
        for rows in reversed(self._drafted_sizes()):
            self._drafted[rows] = record(partial(self.decoder.body, rows, 0, self._drafted_rows))

    def drafted_rows(self, rows: int) -> int:
        """The number of rows that a step of ``rows`` rows, drafts included, is computed with."""
        return _padded(self._drafted_sizes(), rows)

    def run_drafted(self, rows: int) -> None:
        """rows: from ``drafted_rows``."""
        graph = self._drafted.get(rows)
        if graph is not None:
            graph.replay()
        else:
            self.decoder.body(rows, 0, self._drafted_rows)

    def _capture(self, make: Callable[[Record], None]) -> None:
        """Another thread instantiates one while the next is recorded: the one keeps the driver
        busy, the other the interpreter."""
        pool = torch.cuda.graph_pool_handle()
        made: list[Future[None]] = []

        def record(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
            # Not ``torch.cuda.graph``: it collects garbage and empties the cache every time.
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # of what is recorded nothing is wanted any more
                    graph.capture_end()
                raise
            graph.capture_end()
            made.append(beside.submit(graph.instantiate))
            return graph

        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with ThreadPoolExecutor(1, "instantiate") as beside, torch.cuda.stream(stream):
            make(record)
            for one in made:
                one.result()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()

    def make(self, record: Record, most: int) -> None:
        """Record the steps of every size, with up to ``most`` sequences."""
        sizes, shared, mixed, bounds = self._sizes_of(most)
        for size in reversed(sizes):
            self._bodies[size] = record(partial(self.decoder.body, size, size, None))
            self._heads[size] = record(partial(self.decoder.head, size))
            self._heads_and_draws[size] = record(partial(self._head_and_draw, size))
        for size in reversed(shared):
            self._shared[size] = record(partial(self.decoder.body, size, size, None, True))
        for rows in reversed(mixed):
            self._chunks.num_tiles, self._chunks.fit = self._most_tiles(rows), True
            for bound in bounds:
                self._mixed[rows, bound] = record(
                    partial(self.decoder.body, rows, bound, self._chunks)
                )
        self._sizes, self._shared_steps = sizes, shared
        self._mixed_sizes, self._decode_bounds = mixed, bounds

    def _head_and_draw(self, count: int) -> None:
        self.decoder.head(count)
        self.decoder.draw(count)

    def mixed_rows(self, rows: int, num_tiles: int) -> int:
        """The number of rows that a mixed step of ``rows`` rows is computed with."""
        at = bisect_left(self._mixed_sizes, rows)
        if at < len(self._mixed_sizes) and num_tiles <= self._most_tiles(self._mixed_sizes[at]):
            return self._mixed_sizes[at]
        return min(-(-rows // UNGRAPHED_UNIT) * UNGRAPHED_UNIT, self._chunks.max_rows)

    def run_mixed(self, rows: int, num_decode: int) -> None:
        """rows: from ``mixed_rows``."""
        at = bisect_left(self._decode_bounds, num_decode)
        bound = self._decode_bounds[at] if at < len(self._decode_bounds) else num_decode
        graph = self._mixed.get((rows, bound))
        covered = self._chunks.fit and self._chunks.num_tiles <= self._most_tiles(rows)
        if graph is not None and covered:
            graph.replay()
        else:
            self.decoder.body(rows, num_decode, self._chunks)

    def _most_tiles(self, rows: int) -> int:
        """Tiles that a graph of ``rows`` rows covers."""
        return min(-(-rows // QUERY_TILE) + SPARE_TILES + rows // 64, self._chunks.max_tiles)

    def run_decode(self, rows: int, shared: bool = False) -> None:
        """shared: the rows share the prefix that the state names."""
        sizes, graphs = (
            (self._shared_steps, self._shared) if shared else (self._sizes, self._bodies)
        )
        padded = _padded(sizes, rows)
        graph = graphs.get(padded)
        if graph is not None:
            graph.replay()
        else:
            self.decoder.body(padded, padded, None, shared)

    def run_head(self, rows: int) -> None:
        """Logits alone; the rows' tokens are chosen otherwise."""
        padded = _padded(self._sizes, rows)
        graph = self._heads.get(padded)
        if graph is not None:
            graph.replay()
        else:
            self.decoder.head(padded)

    def run_head_and_draw(self, rows: int) -> None:
        padded = _padded(self._sizes, rows)
        graph = self._heads_and_draws.get(padded)
        if graph is not None:
            graph.replay()
        else:
            self._head_and_draw(padded)
