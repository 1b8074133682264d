"""What the kernels are told of a step's prefill rows."""

from __future__ import annotations

import numpy as np
import torch

from penstock.kernels.gpu.prefill_attention import QUERY_TILE
from penstock.services.worker.gpu.chunk_rows import ChunkRows
from penstock.services.worker.gpu.side_stream import SideStream
from penstock.services.worker.slots import PlannedChunk, PlannedStep

NOTHING = np.empty(0, np.int32)


def chunk(slot: int, start: int, count: int, sample: bool = False) -> PlannedChunk:
    return PlannedChunk(slot, start, np.arange(count, dtype=np.int32), sample, NOTHING)


def test_tiles_of_all_chunks_are_sorted_by_the_positions_that_they_see() -> None:
    rows = ChunkRows(2048, 8, torch.device("cpu"))
    chunks = [chunk(3, 500, 300), chunk(1, 0, 130), chunk(7, 400, 1)]
    step = PlannedStep(np.array([0, 2]), chunks, np.array([0, 2]))
    rows.send(step, 512, rows.host_buffer(pinned=False))
    tiles = rows.tiles.T[: rows.num_tiles].tolist()
    expected = []
    row = 2  # behind the decode rows
    for slot, start, count in ((3, 500, 300), (1, 0, 130), (7, 400, 1)):
        expected += [
            [row + at, min(QUERY_TILE, count - at), slot, start + at]
            for at in range(0, count, QUERY_TILE)
        ]
        row += count
    assert sorted(tiles) == sorted(expected)
    seen = [count + first for _, count, _, first in tiles]
    assert seen == sorted(seen)
    assert not rows.tiles[1, rows.num_tiles :].any()


def test_the_last_layer_attends_for_sampled_rows_only_unless_more_of_it_is_read() -> None:
    rows = ChunkRows(2048, 8, torch.device("cpu"))
    chunks = [chunk(3, 500, 300, True), chunk(1, 0, 130), chunk(7, 400, 1, True)]
    step = PlannedStep(np.array([0, 2]), chunks, np.array([0, 2, 3, 7]))
    buffer = rows.host_buffer(pinned=False)
    rows.send(step, 512, buffer, every_row=True)
    assert torch.equal(rows.last_tiles, rows.tiles)
    assert rows.send(step, 512, buffer).tolist() == [0, 1, 301, 432]
    assert rows.last_tiles.T[:2].tolist() == [[432, 1, 7, 400], [301, 1, 3, 799]]
    assert not rows.last_tiles[1, 2:].any()


def test_contexts_that_are_widened_lie_behind_each_other_as_long_as_there_is_room() -> None:
    rows = ChunkRows(2048, 4, torch.device("cpu"), (64, 15))
    buffer = rows.host_buffer(pinned=False)
    chunks = [chunk(3, 500, 300), chunk(1, 0, 64), chunk(0, 63, 1)]
    rows.send(PlannedStep(np.array([2]), chunks, np.array([2])), 512, buffer)
    assert rows.fit
    assert rows.contexts.firsts.tolist() == [0, 13, 14, 15, 15]
    assert rows.contexts.slots.tolist()[:3] == [3, 1, 0]
    rows.send(PlannedStep(np.array([2]), [*chunks, chunk(2, 0, 1)], np.array([2])), 512, buffer)
    assert not rows.fit
    assert not rows.contexts.firsts.any(), "nothing is widened"


def test_on_a_cpu_two_pieces_of_work_run_one_after_the_other() -> None:
    done: list[int] = []
    for first in (False, True):
        beside = SideStream(torch.device("cpu"))
        beside.run(lambda: done.append(1), lambda: done.append(2), other_first=first)
    assert done == [1, 2, 1, 2]
