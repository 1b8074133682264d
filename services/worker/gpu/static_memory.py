"""The memory that the kernels' executor takes beside weights and KV, by its sizes alone.

It takes all of it when it is made: a step allocates next to nothing. The formulas follow the
allocations, each named here; a test compares them with what an executor really holds. Needs no
torch.
"""

from __future__ import annotations

import msgspec

from penstock.kernels.cache_kinds import KVCacheKind, widened_units
from penstock.kernels.gpu.device_facts import USUAL_MULTIPROCESSORS
from penstock.protocol.sampler_parameters import MAX_REDRAWS
from penstock.protocol.sampling import MAX_BIASES, MAX_LOGPROBS, MAX_STOP_TOKENS
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.gpu.graph_sizes import (
    ADAPTED_LAYER_NODES,
    FEW_LAYER_NODES,
    FEW_MIXED_ROWS,
    LAYER_NODES,
    adapted_graph_sizes,
    few_graph_sizes,
    graph_memory,
    graph_sizes,
)
from penstock.services.worker.memory_account import MemoryPart
from penstock.services.worker.models.dense import DenseConfig, specification_of, tables_of
from penstock.services.worker.models.linear_specification import layer_linears

_WORD = 4
"""Bytes of an int32 or fp32."""
_SPLIT, _GROUP, _CANDIDATES = 4096, 64, 4096
"""As in ``penstock.kernels.gpu.sampler_memory``."""
_STAGES, _STAGE_NUMBERS = 16, 3
"""Likewise."""
_WORDS, _WORD_TOKENS, _RING = 128, 2048, 64
"""As in ``penstock.kernels.sampling.bad_words``."""
_QUERY_TILE = 128
"""As in ``penstock.kernels.gpu.prefill_attention``."""
_DECODE_PROGRAMS, _MOST_SPLITS, _LEAST_GROUP = 8, 128, 8
_PREFIX_PROGRAMS, _PREFIX_QUERIES, _MOST_PARTS = 2, 64, 16
"""As in ``penstock.kernels.gpu.decode_shapes`` and ``shared_prefix``."""
_FIRST_CHANGES, _COLUMNS = 16_384, 21
"""As in ``batch_state``."""
_LEAST_UNIT = 64
"""As in ``penstock.kernels.gpu.widen_cache``."""
_WIDENED_DIMS, _WIDEST_BLOCK = (64, 128), 128
"""As in ``penstock.kernels.gpu.prefill_attention_hopper``."""
LIBRARY_BYTES = 64 << 20
"""cuBLAS keeps 32 MiB for each stream that it is used on, on Hopper, and less elsewhere."""


class ExecutorSizes(msgspec.Struct, frozen=True):
    """What the memory of the kernels' executor depends on."""

    config: DenseConfig
    capacity: EngineSizes
    """Its number of blocks does not matter."""
    item_bytes: int
    """Of a weight or activation."""
    attention_alone: bool = False
    """Whether the layers are computed by code that allocates as it goes."""
    multiprocessors: int = USUAL_MULTIPROCESSORS
    """Of the device."""
    adapted: bool = False
    """Whether steps with adapters have graphs of their own."""
    widens: bool = False
    """Whether keys and values of chunks are widened: ``widens_keys``."""

    @property
    def rows(self) -> int:
        """Rows of the largest step."""
        return max(self.capacity.max_num_batched_tokens, self.capacity.max_num_seqs)

    @property
    def table_width(self) -> int:
        """Entries of a block table of a slot."""
        width = -(-self.capacity.max_model_len // self.capacity.block_size)
        return -(-width // 4) * 4

    @property
    def table_entries(self) -> int:
        """Entries of all block tables."""
        tables = max(1, len(self.capacity.groups)) * self.capacity.max_num_seqs
        return tables * self.table_width


def widens_keys(
    config: DenseConfig, kind: KVCacheKind, item_bytes: int, block_size: int, *, hopper: bool
) -> bool:
    """Whether chunks over KV memory of this kind are attended to by a kernel for Hopper that reads
    the model's type. item_bytes: of that."""
    fits = item_bytes == 2 and config.head_dim in _WIDENED_DIMS and block_size <= _WIDEST_BLOCK
    return hopper and kind != "auto" and fits


def static_parts(sizes: ExecutorSizes) -> list[MemoryPart]:
    """All but weights, KV memory and what is not torch's."""
    slots, rows = sizes.capacity.max_num_seqs, sizes.rows
    return [
        MemoryPart("step", _workspace(sizes), f"activations of {rows:,} rows"),
        MemoryPart("step", _rotary(sizes)),
        MemoryPart("step", _batch(sizes) + _attention(sizes) + _widened(sizes)),
        MemoryPart("sampler", _logits(sizes), f"logits of {slots:,} rows"),
        MemoryPart("sampler", _sampler(sizes)),
        MemoryPart("grammars", _masks(sizes), "masks"),
    ]


def later_parts(sizes: ExecutorSizes) -> list[MemoryPart]:
    """What is taken after the profile of a step: by the driver for graphs, and for a moment in
    steps that begin many sequences or follow grammars."""
    config, capacity = sizes.config, sizes.capacity
    most, rows = capacity.max_num_seqs, sizes.rows
    if sizes.attention_alone:
        made, nodes = few_graph_sizes(most, rows, shares_prefixes=True), FEW_LAYER_NODES
    else:
        operations = layer_operations(config)
        made, nodes = graph_sizes(most, rows, operations, shares_prefixes=True), LAYER_NODES
    count, graphs = graph_memory(made, config.num_layers, nodes)
    if sizes.adapted:
        made = adapted_graph_sizes(most, rows, layer_operations(config))
        nodes = ADAPTED_LAYER_NODES
        more = graph_memory(made, config.num_layers, nodes)
        count, graphs = count + more[0], graphs + more[1]
    changes = 4 * _WORD * (sizes.table_entries + 32 * capacity.max_num_seqs)
    return [
        MemoryPart("graphs", graphs + LIBRARY_BYTES // 2, f"{count} graphs"),
        MemoryPart("grammars", 2 * _masks(sizes)),
        MemoryPart("step", max(0, changes - _WORD * _FIRST_CHANGES)),
    ]


def of_profile(sizes: ExecutorSizes, activations: int) -> list[MemoryPart]:
    """All but weights and KV memory, with what the largest step takes beside ``static_parts``: of
    code that allocates as it goes, once for steps that are launched and once for graphs."""
    parts = [*static_parts(sizes), MemoryPart("step", activations), *later_parts(sizes)]
    if sizes.attention_alone:
        share = min(1.0, FEW_MIXED_ROWS / sizes.rows)
        parts.append(MemoryPart("graphs", int(share * activations), "activations of their own"))
    return parts


def layer_operations(config: DenseConfig) -> int:
    """Floating point operations of the products of a layer, the one with the most, for one row."""
    return max(
        2 * sum(each.outputs * each.inputs for each in layer_linears(layer, config.hidden_size))
        for layer in set(specification_of(config).layers)
    )


def _workspace(sizes: ExecutorSizes) -> int:
    """``make_workspace``, but for the logits; or what ``ModelDecoder`` has in its place."""
    config, dim = sizes.config, sizes.config.head_dim
    heads = 3 * config.num_heads + 2 * config.num_kv_heads
    if sizes.attention_alone:
        words = 4 * _WORD
        return sizes.rows * ((config.hidden_size + heads * dim) * sizes.item_bytes + words)
    width = 3 * config.hidden_size + heads * dim + 3 * config.intermediate_size
    return sizes.rows * width * sizes.item_bytes


def _rotary(sizes: ExecutorSizes) -> int:
    """Cosines and sines, half a head each, of every distinct embedding."""
    tables = len(set(tables_of(sizes.config)))
    return tables * sizes.capacity.max_model_len * sizes.config.head_dim * _WORD


def _batch(sizes: ExecutorSizes) -> int:
    """``BatchState`` and ``ChunkRows``."""
    slots, rows = sizes.capacity.max_num_seqs, sizes.rows
    tiles = rows // _QUERY_TILE + slots + 1
    state = sizes.table_entries + _COLUMNS * _padded(slots) + _FIRST_CHANGES
    return _WORD * (state + 3 * rows + 8 * tiles)


def _attention(sizes: ExecutorSizes) -> int:
    """What is known of splits of contexts and of a shared prefix: ``decode_workspace`` and
    ``shared_prefix``."""
    config, slots = sizes.config, sizes.capacity.max_num_seqs
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    shared = 1 << (heads // kv_heads - 1).bit_length()

    def cut(pieces: int, programs: int, most: int) -> int:
        wanted = max(1, programs * sizes.multiprocessors // pieces)
        return min(most, 1 << (wanted.bit_length() - 1))

    rows = range(1, slots + 1)
    splits = max(row * cut(row * kv_heads, _DECODE_PROGRAMS, _MOST_SPLITS) for row in rows)
    prefixes = max(
        row * cut(-(-row * shared // _PREFIX_QUERIES) * kv_heads, _PREFIX_PROGRAMS, _MOST_PARTS)
        for row in rows
    )
    counters = (slots + splits // _LEAST_GROUP) * kv_heads
    return _WORD * ((splits + prefixes) * heads * (dim + 2) + counters)


def _widened(sizes: ExecutorSizes) -> int:
    """``wide_cache``, its block table, and what chunks say of their contexts."""
    if not sizes.widens:
        return 0
    config, slots, size = sizes.config, sizes.capacity.max_num_seqs, sizes.capacity.block_size
    unit = max(_LEAST_UNIT, size)
    units = widened_units(
        slots, sizes.table_width, config.num_kv_heads, config.head_dim, sizes.item_bytes, unit, size
    )
    wide = 2 * units * unit * config.num_kv_heads * config.head_dim * sizes.item_bytes
    return wide + _WORD * slots * (sizes.table_width + 2)


def _logits(sizes: ExecutorSizes) -> int:
    vocab, slots = sizes.config.vocab_size, sizes.capacity.max_num_seqs
    return slots * (vocab * sizes.item_bytes + 2 * _WORD * (_vocab_splits(vocab) + 1))


def _sampler(sizes: ExecutorSizes) -> int:
    """``sampler_slots`` but for the masks, ``sampler_space``, ``WordTable`` and logprobs."""
    vocab, slots = sizes.config.vocab_size, sizes.capacity.max_num_seqs
    groups = -(-vocab // _GROUP)
    entries = 3 * (MAX_BIASES + 2 * MAX_STOP_TOKENS + MAX_REDRAWS)
    words = 2 * _WORDS + 1 + _WORD_TOKENS + _RING
    space = vocab + groups + 4 * _vocab_splits(vocab) + _power_of_two(groups) + 2 * _CANDIDATES + 3
    logprobs = 3 + 2 * MAX_LOGPROBS
    stages = _STAGES * (1 + _STAGE_NUMBERS) + 2
    return slots * (2 * vocab + _WORD * (entries + words + space + logprobs + stages))


def _masks(sizes: ExecutorSizes) -> int:
    """A bit for each token of the vocabulary and each slot."""
    return sizes.capacity.max_num_seqs * -(-sizes.config.vocab_size // 32) * _WORD


def _padded(count: int) -> int:
    return -(-count // 32) * 32


def _vocab_splits(vocab: int) -> int:
    return -(-vocab // _SPLIT)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
