"""Which sizes of steps graphs are made for, and what memory graphs take; needs no torch."""

from __future__ import annotations

from typing import NamedTuple

from penstock.services.worker.gpu.shared_rows import LEAST_ROWS

MIXED_ROWS = [
    16, 32, 64, *range(128, 2049, 128), *range(2304, 4097, 256), *range(4608, 8193, 512),
]  # fmt: skip
"""Rows of mixed steps that graphs are made for. Launched one by one, the kernels of a step take the
host 15 to 20 ms: longer than a small model's step of 4,096 rows takes the device. In larger ones
than these the device is busy for longer, and in less large ones of large models: see ..."""
MOST_LAYER_OPERATIONS = 800e9
"""... as many in the products of a layer take an H200 a millisecond, at 800 TFLOP/s, and others
longer: twice what the host takes to launch its kernels."""
SPARE_TILES = 16
"""Tiles of prefill attention beyond those of the rows, and one for 64 rows: each chunk may begin
another one."""
DRAFTED_ROWS = [4, 8, 16, 24, 32, 48, 64, 96, 128]
"""Rows of steps with drafts, which have graphs where there are drafts; no step has more."""
MIXED_DECODE = 64
"""Mixed steps with up to so many decode rows have graphs of their own, that split contexts."""
SHARED_SIZES = [LEAST_ROWS, 16, 32, 64, 128, 192, 256, 384, 512, *range(768, 1 << 16, 256)]
"""Batch sizes that graphs with a shared prefix are made for."""
FEW_DECODE = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 1 << 16, 32)]
"""Batch sizes of models whose code is not ours: a layer has five times as many kernels, and so has
a graph."""
FEW_MIXED_ROWS = 2048
"""Rows of their largest mixed step that has a graph; in larger ones the device is busy for longer
than the host takes to launch the kernels."""
GRAPH_BYTES = 256 * 1024
"""What a graph is counted with, beside its kernels. The driver tells nobody what it takes: the
figures are meant to be too high, and a worker compares them with what its graphs have taken."""
NODE_BYTES = 4 * 1024
"""What a kernel in a graph is counted with."""
LAYER_NODES, OTHER_NODES = 10, 6
"""Kernels of a layer, and of a step beside its layers, at most."""
ADAPTED_LAYER_NODES = LAYER_NODES + 8
"""Those of a layer in steps with adapters: two more for each linear layer."""
FEW_LAYER_NODES = 70
"""Kernels of a layer of modelling code that is not ours: of Qwen3's in transformers 62."""


class GraphSizes(NamedTuple):
    """The steps that have graphs, all sizes ascending."""

    decode: list[int]
    """Numbers of decode rows."""
    shared: list[int]
    """Those of steps whose rows share a prefix."""
    mixed: list[int]
    """Rows of mixed steps ..."""
    bounds: list[int]
    """... and decode rows that they have room for: a graph for each pair."""


def graph_sizes(
    most: int, max_rows: int, layer_operations: int, shares_prefixes: bool
) -> GraphSizes:
    """For up to ``most`` sequences; max_rows: of a step; layer_operations: of a layer's products,
    for one row."""
    shared = shared_sizes(most) if shares_prefixes else []
    mixed = mixed_sizes(max_rows, layer_operations)
    return GraphSizes(ladder(most), shared, mixed, decode_bounds(most))


def few_graph_sizes(most: int, max_rows: int, shares_prefixes: bool) -> GraphSizes:
    """Those of models whose code is not ours; see ``graph_sizes``."""
    decode = [*(size for size in FEW_DECODE if size < most), most]
    shared = shared_sizes(most) if shares_prefixes else []
    mixed = [rows for rows in MIXED_ROWS if rows <= min(max_rows, FEW_MIXED_ROWS)]
    return GraphSizes(decode, shared, mixed, decode_bounds(most))


def adapted_graph_sizes(most: int, max_rows: int, layer_operations: int) -> GraphSizes:
    """Those of steps with adapters, beside those of ``graph_sizes``: fewer of decode rows, since
    all are captured at the start; as many of mixed steps, whose launches take the host longer."""
    few = few_graph_sizes(most, max_rows, shares_prefixes=False)
    return few._replace(mixed=mixed_sizes(max_rows, layer_operations))


def ladder(most: int) -> list[int]:
    """Batch sizes that graphs are made for; the last is ``most``."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, 1 << 16, 32)]
    return [*(size for size in sizes if size < most), most]


def shared_sizes(most: int) -> list[int]:
    """Sizes of decode steps whose rows share a prefix, up to one for ``most`` rows."""
    return [*(size for size in SHARED_SIZES if size < most), most] if most >= LEAST_ROWS else []


def decode_bounds(most: int) -> list[int]:
    """Decode rows that graphs of mixed steps have room for."""
    return sorted({min(MIXED_DECODE, most), most})


def mixed_sizes(max_rows: int, layer_operations: int) -> list[int]:
    """layer_operations: of a layer's products, for one row."""
    most = min(max_rows, MOST_LAYER_OPERATIONS / layer_operations)
    return [rows for rows in MIXED_ROWS if rows <= most]


def drafted_sizes(most: int) -> list[int]:
    """Rows that steps with drafts are padded to; most: of the largest."""
    return [*(rows for rows in DRAFTED_ROWS if rows < most), most]


def graph_memory(sizes: GraphSizes, layers: int, layer_nodes: int) -> tuple[int, int]:
    """How many graphs are made, and the bytes that they are counted with.

    layer_nodes: kernels of a layer.
    """
    bodies = len(sizes.decode) + len(sizes.shared) + len(sizes.bounds) * len(sizes.mixed)
    heads = 2 * len(sizes.decode)
    nodes = bodies * (layer_nodes * layers + OTHER_NODES) + heads * (layer_nodes + OTHER_NODES)
    return bodies + heads, (bodies + heads) * GRAPH_BYTES + nodes * NODE_BYTES
