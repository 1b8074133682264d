"""Stands for a CUDA graph where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.services.worker.gpu.chunk_rows import ChunkRows


class Repeated:
    """Work that is done again as it was recorded: what a graph does, launch by launch."""

    def __init__(self, chunks: ChunkRows, work: Callable[[], None]) -> None:
        self._chunks, self._work = chunks, work
        self._tiles = chunks.num_tiles

    def replay(self) -> None:
        actual, self._chunks.num_tiles = self._chunks.num_tiles, self._tiles
        with torch.inference_mode():
            self._work()
        self._chunks.num_tiles = actual
