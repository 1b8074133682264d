"""Which steps have graphs, and with how many rows the others are computed."""

from __future__ import annotations

from typing import cast

import torch

from penstock.services.worker.gpu.chunk_rows import ChunkRows
from penstock.services.worker.gpu.drafted_rows import DraftedRows
from penstock.services.worker.gpu.graph_sizes import GraphSizes, graph_sizes
from penstock.services.worker.gpu.graphs import Replayable, StepGraphs
from penstock.services.worker.gpu.step_decoder import StepDecoder

SLOTS = 256


class Decoder:
    """Layers of some size, and which mixed steps were launched kernel by kernel."""

    def __init__(self, hidden: int, inner: int) -> None:
        weights = hidden * (6144 * hidden // 4096 + hidden + 3 * inner)
        self._operations = 2 * weights
        self.launched: list[tuple[int, int]] = []

    def graph_sizes(self, most: int, max_rows: int) -> GraphSizes:
        return graph_sizes(most, max_rows, self._operations, shares_prefixes=True)

    def body(self, rows: int, num_decode: int, chunks: ChunkRows) -> None:
        self.launched.append((rows, num_decode))

    def head(self, count: int) -> None: ...


class Graph:
    replayed = 0

    def replay(self) -> None:
        Graph.replayed += 1


def graphs_of(decoder: Decoder, max_rows: int) -> tuple[StepGraphs, ChunkRows]:
    chunks = ChunkRows(max_rows, SLOTS, torch.device("cpu"))
    graphs = StepGraphs(cast(StepDecoder, decoder), chunks)
    graphs.make(lambda work: cast(Replayable, Graph()), SLOTS)
    return graphs, chunks


def test_mixed_steps_have_graphs_until_a_layer_keeps_the_device_busy() -> None:
    for decoder, rows in ((Decoder(4096, 12288), 2048), (Decoder(1024, 3072), 8192)):
        graphs, chunks = graphs_of(decoder, 8192)
        chunks.num_tiles, Graph.replayed = 1, 0
        graphs.run_mixed(graphs.mixed_rows(rows, 1), 3)
        assert (Graph.replayed, decoder.launched) == (1, [])
    graphs, chunks = graphs_of(large := Decoder(4096, 12288), 8192)
    chunks.num_tiles = 1
    graphs.run_mixed(graphs.mixed_rows(2049, 1), 3)
    assert large.launched == [(2176, 3)]


def test_steps_without_a_graph_are_padded_within_the_largest_step() -> None:
    graphs, _ = graphs_of(Decoder(4096, 12288), 5000)
    for rows in range(2049, 5001):
        padded = graphs.mixed_rows(rows, 1)
        assert rows <= padded <= min(rows + 127, 5000)
        assert padded % 128 == 0 or padded == 5000


class Drafted:
    """As much of ``DraftedRows`` as graphs know of."""

    most_rows, tokens = 100, torch.zeros(1)


def test_steps_with_drafts_have_graphs_up_to_the_most_rows_that_they_may_have() -> None:
    graphs, _ = graphs_of(decoder := Decoder(1024, 3072), 8192)
    graphs.take_drafts(cast(DraftedRows, Drafted()))
    graphs.make_drafted(lambda work: cast(Replayable, Graph()))
    Graph.replayed = 0
    for rows in range(2, 101):
        padded = graphs.drafted_rows(rows)
        assert rows <= padded <= 100
        graphs.run_drafted(padded)
    assert (Graph.replayed, decoder.launched) == (99, [])


def test_a_step_of_more_tiles_than_its_graph_covers_is_launched() -> None:
    graphs, chunks = graphs_of(decoder := Decoder(1024, 3072), 8192)
    chunks.num_tiles, Graph.replayed = chunks.max_tiles, 0
    padded = graphs.mixed_rows(20, chunks.num_tiles)
    graphs.run_mixed(padded, 2)
    assert Graph.replayed == 0
    assert decoder.launched == [(padded, 2)] and padded == 128
