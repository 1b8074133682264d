"""Steps of an encoder on a GPU: attention by our own kernel, and a graph for each of some sizes.

    prompts ──► one copy to the device: tokens, positions, segments, tiles, spans ──► graph of the
    least size that holds them: layers, pooling, head ──► one copy back: a row for each prompt

What a prompt attends to and where it ends is read from memory, so a graph serves any prompts. Its
rows are filled up to its size; nothing of a prompt depends on them. Larger steps are launched
kernel by kernel: the device is busy with them for longer than the host is with launches. Nobody
waits for a step until its numbers are asked for, so the next one is prepared meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.gpu.packed_rows import packed_tiles, pool_rows, tiles_for
from penstock.protocol.pooling import PoolingKind
from penstock.services.worker.encoders.packed_rows import PackedRows, Prompt
from penstock.services.worker.gpu.kernel_choice import short
from penstock.services.worker.pooling import States

GRAPH_ROWS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Rows of the steps that have graphs."""
MOST_STARTED = 3
"""Steps that may be started and not over."""


class Layers(Protocol):
    """``Encoder``, or what stands for it."""

    @property
    def device(self) -> torch.device: ...

    def __call__(self, rows: PackedRows) -> Tensor:
        """[N, hidden]."""


class _Size(NamedTuple):
    """A step of at most so many rows and prompts; of its numbers, int32, tokens stand first, then
    positions, segments, tiles and spans."""

    rows: int
    prompts: int

    @property
    def tiles(self) -> int:
        return tiles_for(self.rows, self.prompts)

    @property
    def parts(self) -> tuple[int, ...]:
        return self.rows, self.rows, self.rows, 3 * self.tiles, 2 * self.prompts

    def fill(
        self, numbers: np.ndarray[tuple[int, ...], np.dtype[np.int32]], prompts: Sequence[Prompt]
    ) -> None:
        """numbers: as many as ``parts`` has together, all 0."""
        ends = np.cumsum(self.parts)
        tokens, positions, segments, tiles, spans = np.split(numbers, ends[:-1])
        begin, found = 0, []
        for prompt in prompts:
            end = begin + len(prompt.tokens)
            tokens[begin:end] = prompt.tokens
            positions[begin:end] = np.arange(end - begin)
            if prompt.second:
                segments[begin + prompt.second : end] = 1
            found.append((begin, end))
            begin = end
        of_prompts = packed_tiles(found).ravel()
        tiles[: len(of_prompts)] = of_prompts
        spans[: 2 * len(found)] = np.array(found, np.int32).ravel()


class StartedStep(NamedTuple):
    """A step whose kernels are on the device's stream."""

    result: Tensor
    """[prompts, numbers] on the host, once ``event`` has passed; until ``MOST_STARTED`` further
    steps were started."""
    event: torch.cuda.Event | None

    @property
    def is_over(self) -> bool:
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def values(self) -> States:
        """Waits."""
        if self.event is not None:
            self.event.synchronize()
        found: States = self.result.numpy()
        return found


class GpuSteps:
    """What ``EncoderExecutor`` computes, on a GPU. Used from one thread."""

    def __init__(
        self,
        layers: Layers,
        head: Callable[[Tensor], Tensor] | None,
        kind: PoolingKind,
        most_rows: int,
        most_prompts: int,
    ) -> None:
        """most_rows, most_prompts: of a step."""
        self._layers, self._head, self._kind = layers, head, kind
        self._device = layers.device
        self._most_prompts = most_prompts
        self._on_gpu = self._device.type == "cuda"
        most = sum(_Size(most_rows, most_prompts).parts)
        self._numbers = [
            torch.zeros(most, dtype=torch.int32, pin_memory=self._on_gpu)
            for _ in range(MOST_STARTED + 1)
        ]
        self._results: list[Tensor] = []
        """[most prompts, numbers] on the host; each in its turn, as ``_numbers``."""
        self._turn = 0
        self._inputs = torch.zeros(most, dtype=torch.int32, device=self._device)
        self._graphs: dict[int, tuple[_Size, torch.cuda.CUDAGraph, Tensor]] = {}
        self.why_none = "" if self._on_gpu else "no CUDA device"
        if self._on_gpu:
            self._capture([rows for rows in GRAPH_ROWS if rows <= most_rows])

    def _capture(self, sizes: Sequence[int]) -> None:
        """Largest first: the smaller ones fit the memory that it has taken."""
        pool = torch.cuda.graph_pool_handle()
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        try:
            for rows in reversed(sizes):
                size = _Size(rows, min(rows, self._most_prompts))
                with torch.inference_mode(), torch.cuda.stream(side):
                    self._computed(size)
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=pool, stream=side):
                        out = self._computed(size)
                self._graphs[rows] = size, graph, out
            side.synchronize()
        except Exception as failure:  # of code that cannot be captured
            self._graphs.clear()
            self.why_none = short(failure)
            torch.cuda.synchronize()

    def compute(self, prompts: Sequence[Prompt]) -> States:
        """[prompts, numbers] in their order: pooled states, or logits."""
        return self.start(prompts).values().copy()

    def start(self, prompts: Sequence[Prompt]) -> StartedStep:
        """At most ``MOST_STARTED`` may not be over."""
        if not prompts:
            return StartedStep(torch.empty(0, 0), None)
        rows = sum(len(prompt.tokens) for prompt in prompts)
        found = next((each for each in sorted(self._graphs) if each >= rows), None)
        size = self._graphs[found][0] if found else _Size(rows, len(prompts))
        count = sum(size.parts)
        self._turn = (self._turn + 1) % len(self._numbers)
        numbers = self._numbers[self._turn][:count]
        plain = numbers.numpy()
        plain[:] = 0
        size.fill(plain, prompts)
        self._inputs[:count].copy_(numbers, non_blocking=True)
        if found:
            _, graph, out = self._graphs[found]
            graph.replay()
        else:
            with torch.inference_mode():
                out = self._computed(size)
        return self._fetched(out[: len(prompts)])

    def _fetched(self, out: Tensor) -> StartedStep:
        if not self._results:
            shape = len(self._numbers), self._most_prompts, out.shape[1]
            self._results = list(torch.empty(shape, pin_memory=self._on_gpu))
        result = self._results[self._turn][: len(out)]
        result.copy_(out, non_blocking=True)
        if not self._on_gpu:
            return StartedStep(result, None)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return StartedStep(result, event)

    def _computed(self, size: _Size) -> Tensor:
        """[prompts, numbers] fp32 of what stands in ``_inputs``."""
        parts = torch.split(self._inputs[: sum(size.parts)], list(size.parts))
        tokens, positions, segments = parts[:3]
        tiles, spans = parts[3].view(-1, 3), parts[4].view(-1, 2)
        states = self._layers(PackedRows(tokens, positions, segments, [], [], tiles))
        pooled = states.new_empty(size.prompts, states.shape[1], dtype=torch.float32)
        pool_rows(states.contiguous(), spans, self._kind, pooled)
        return pooled if self._head is None else self._head(pooled).float()
