"""Which rows of a step have which adapter, on the device; sent when that changes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.gpu.low_rank import (
    FEW_TILE,
    MANY_TILE,
    SPLIT_ROWS,
    RowTiles,
    most_tiles,
    row_tiles,
)
from penstock.services.worker.gpu.batch_state import RING
from penstock.services.worker.slots import IntArray, PlannedStep, SlotTable


class AdapterTiles:
    """Two lists of tiles, see ``RowTiles``: of all rows of a step, and of those that are sampled,
    which are the step's first rows behind the last attention."""

    def __init__(
        self, slots: SlotTable, max_rows: int, adapters: int, device: torch.device
    ) -> None:
        """max_rows: of a step; adapters: that may be loaded at once."""
        self._slots, self._adapters = slots, adapters
        sampled = slots.capacity.max_num_seqs
        most = max(
            most_tiles(max_rows, MANY_TILE, adapters), most_tiles(sampled, FEW_TILE, adapters)
        )
        lengths = [max_rows, 3 * most, SPLIT_ROWS, sampled, 3 * most, SPLIT_ROWS]
        self._places = np.cumsum([0, *(-(-n // 32) * 32 for n in lengths)]).tolist()
        self._most = most
        self._device = torch.full((self._places[-1],), -1, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._ring = [
            torch.zeros(len(self._device), dtype=torch.int32, pin_memory=pinned)
            for _ in range(RING)
        ]
        self._sent: IntArray | None = None
        """The decode rows of the last step, if it had no others."""
        self._any = False

    def update(self, step: PlannedStep, ring: int) -> bool:
        """Whether a row of a step has an adapter; which ones is on the device then.

        ring: which host buffer is free; see ``BatchState.update``.
        """
        decoding = step.decoding
        if decoding is self._sent and not step.chunks:
            return self._any
        self._sent = None if step.chunks else decoding
        held = self._slots.adapter - 1
        numbers = [held[decoding]]
        numbers += [np.full(len(each.tokens), held[each.slot]) for each in step.chunks]
        owners = np.concatenate(numbers)
        self._any = bool((owners >= 0).any())
        if self._any:
            host = self._ring[ring]
            size = MANY_TILE if step.chunks else FEW_TILE
            self._pack(host.numpy(), 0, owners, size)
            self._pack(host.numpy(), 3, held[step.sampled], FEW_TILE)
            self._device.copy_(host, non_blocking=True)
        return self._any

    def _pack(self, host: IntArray, which: int, adapters: IntArray, size: int) -> None:
        """which: of ``_places``, where the list begins."""
        order, tiles = row_tiles(adapters, size)
        begin, middle, last = self._places[which : which + 3]
        host[begin : begin + len(order)] = order
        held = host[middle : middle + 3 * self._most].reshape(3, self._most)
        held[0, tiles.shape[1] :] = -1
        held[:, : tiles.shape[1]] = tiles
        of_rows, few = host[last : last + SPLIT_ROWS], adapters[:SPLIT_ROWS]
        of_rows[: len(few)], of_rows[len(few) :] = few, -1

    def forget(self) -> None:
        """The device's lists may be anything."""
        self._sent = None

    def all(self, rows: int, *, mixed: bool) -> RowTiles:
        """Of a step of up to ``rows`` rows; mixed: of other than decode rows, too."""
        return self._tiles(0, rows, MANY_TILE if mixed else FEW_TILE)

    def sampled(self, rows: int) -> RowTiles:
        """Of up to ``rows`` sampled rows."""
        return self._tiles(3, rows, FEW_TILE)

    def _tiles(self, which: int, rows: int, size: int) -> RowTiles:
        order, middle, last = (self._device[place:] for place in self._places[which : which + 3])
        tiles: Tensor = middle[: 3 * self._most].view(3, self._most)
        launched = most_tiles(rows, size, self._adapters)
        return RowTiles(order, tiles, launched, rows, size, last[:SPLIT_ROWS])
