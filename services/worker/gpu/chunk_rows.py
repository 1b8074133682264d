"""What the kernels must know of the prefill rows of a step, sent in one copy."""

from __future__ import annotations

import numpy as np
import torch

from penstock.kernels.gpu.prefill_attention import QUERY_TILE
from penstock.kernels.gpu.widen_cache import Contexts
from penstock.services.worker.slots import IntArray, PlannedStep


class ChunkRows:
    """Device arrays of one mixed step; rows past the step's own are padding."""

    def __init__(
        self,
        max_rows: int,
        max_chunks: int,
        device: torch.device,
        widened: tuple[int, int] = (0, 0),
    ) -> None:
        """widened: see ``LayerAttention.widened_room``."""
        self.max_tiles = max_rows // QUERY_TILE + max_chunks + 1
        self._unit, self._units = widened
        contexts = [max_chunks + 1, max_chunks] if self._units else []
        lengths = [max_rows, max_rows, max_rows, 4 * self.max_tiles, 4 * self.max_tiles, *contexts]
        places = np.cumsum([0, *(-(-n // 32) * 32 for n in lengths)]).tolist()
        self._places = places
        self._device = torch.zeros(places[-1], dtype=torch.int32, device=device)
        parts = [
            self._device[place : place + length]
            for place, length in zip(places, lengths, strict=False)
        ]
        self.tokens, self.slots, self.positions = parts[:3]
        """[T] int32: token of each row, -1: the last token of the decode row's slot; slot of each
        chunk row, -1 for others; position of each chunk row."""
        self.tiles, self.last_tiles = (part.view(4, self.max_tiles) for part in parts[3:5])
        """See ``prefill_attention``; those of the last layer are for what is read of it."""
        self.contexts = Contexts(*parts[5:]) if contexts else Contexts(parts[0], parts[0])
        """Of the chunks, where contexts are widened."""
        self.fit = True
        """Whether there is room for them."""
        self.num_tiles = 0
        """Tiles that a launch covers; those past the step's own or the last layer's are empty."""
        self.max_rows = max_rows
        self.hands_on = False
        """Whether others read all of the last layer: a later stage of a pipeline."""

    @staticmethod
    def tiles_of(step: PlannedStep) -> int:
        """Tiles that a step's chunks are cut into."""
        return sum(-(-len(chunk.tokens) // QUERY_TILE) for chunk in step.chunks)

    def host_buffer(self, pinned: bool) -> torch.Tensor:
        """Memory that ``send`` may pack a step into."""
        return torch.zeros(len(self._device), dtype=torch.int32, pin_memory=pinned)

    def clear(self) -> None:
        """Every row is padding. What lies past a step's rows came from a host buffer as it was."""
        self._device.zero_()
        self.slots.fill_(-1)
        self.fit = True

    def send(
        self, step: PlannedStep, rows: int, host: torch.Tensor, every_row: bool = False
    ) -> IntArray:
        """Lay out a step whose rows are padded to ``rows``; returns the row of each of its
        sampled entries.

        host: from ``host_buffer``, free until the step is over; every_row: more of the last layer
        is read than the sampled rows.
        """
        packed = host.numpy()
        tokens, slots, positions = (packed[place : place + rows] for place in self._places[:3])
        tiles, last_tiles = (
            packed[first : first + 4 * self.max_tiles].reshape(4, self.max_tiles)
            for first in self._places[3:5]
        )
        decoding = len(step.decoding)
        tokens[:decoding] = -1
        slots[:] = -1
        sampled, ends, row, tile = [], [], decoding, 0
        for chunk in step.chunks:
            count = len(chunk.tokens)
            end = row + count
            tokens[row:end] = chunk.tokens
            slots[row:end] = chunk.slot
            positions[row:end] = np.arange(chunk.start, chunk.start + count)
            starts = np.arange(0, count, QUERY_TILE)
            last = tile + len(starts)
            tiles[0, tile:last] = row + starts
            tiles[1, tile:last] = np.minimum(QUERY_TILE, count - starts)
            tiles[2, tile:last] = chunk.slot
            tiles[3, tile:last] = chunk.start + starts
            row, tile = end, last
            if chunk.sample:
                sampled.append(row - 1)
                ends.append((row - 1, 1, chunk.slot, chunk.start + count - 1))
        tokens[row:] = 0
        self.num_tiles = tile
        _sort_tiles(tiles, tile)
        if every_row or self.hands_on:
            last_tiles[:] = tiles
        else:
            last_tiles[1] = 0
            ends.sort(key=lambda end: end[3])
            last_tiles[:, : len(ends)] = np.array(ends, np.int32).reshape(-1, 4).T
        if self._units:
            self._lay_out_contexts(step, packed)
        self._device.copy_(host, non_blocking=True)
        return np.concatenate((np.arange(decoding), np.array(sampled, np.int64)))

    def _lay_out_contexts(self, step: PlannedStep, packed: IntArray) -> None:
        """Which units of widened memory each chunk's positions get, one chunk behind the other."""
        counts = [-(-(chunk.start + len(chunk.tokens)) // self._unit) for chunk in step.chunks]
        ends = np.cumsum([0, *counts])
        self.fit = bool(ends[-1] <= self._units)
        firsts, slots = (packed[self._places[part] : self._places[part + 1]] for part in (5, 6))
        firsts[:] = ends[-1] if self.fit else 0
        firsts[: len(counts)] = ends[:-1] if self.fit else 0
        slots[: len(counts)] = [chunk.slot for chunk in step.chunks]


def _sort_tiles(tiles: IntArray, count: int) -> None:
    """Put those with the least work first: kernels begin with the last. tiles: [4, N], of which
    ``count`` are a step's; the others become empty."""
    order = np.argsort(tiles[1, :count] + tiles[3, :count], kind="stable")
    tiles[:, :count] = tiles[:, order]
    tiles[1, count:] = 0
