"""The cases of ``penstock bench kernels`` on the CPU: what a CPU worker computes with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.activation import silu_and_mul
from penstock.kernels.attention import KV_TILE, ReferenceAttention, paged_attention
from penstock.kernels.attention_backend import CacheShape, IntArray, QuerySpans
from penstock.kernels.draw_keys import draw_keys
from penstock.kernels.kv_cache import write_kv
from penstock.kernels.rms_norm import rms_norm, rms_norm_fp32, scaled_norm_weight
from penstock.kernels.rotary import apply_rotary
from penstock.kernels.sampling import SamplingRows, sample
from penstock.loadtest.kernel_benches.kernel_case import Grid, KernelCase, Maker, blocks_of
from penstock.loadtest.roofline.decoder_cost import attention_flops, linear_shapes
from penstock.protocol.sampling import GREEDY_TEMPERATURE
from penstock.services.worker.models.linear import Linear
from penstock.services.worker.models.linear_specification import LinearSpecification

Call = Callable[[], object]


def cpu_cases(maker: Maker, grid: Grid) -> Iterator[KernelCase]:
    """All cases. Their memory is taken by ``make`` alone."""
    config, size = maker.config, maker.dtype.itemsize
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    fused = heads + 2 * kv_heads
    for rows in grid.counts:
        name = f"{rows} rows"
        yield KernelCase("rms_norm", name, 2 * rows * hidden * size, 0, partial(_norm, maker, rows))
        yield KernelCase(
            "silu_and_mul", name, 3 * rows * inner * size, 0, partial(_silu, maker, rows)
        )
        yield KernelCase(
            "norm, rope, write", name, 2 * rows * fused * dim * size, 0,
            partial(_rope, maker, rows, grid.block_size),
        )  # fmt: skip
    for batch in grid.batches:
        for context in grid.contexts:
            yield KernelCase(
                "decode_attention", f"{batch} x {context}",
                2 * batch * (maker.read(context - 1, 1) * kv_heads + heads) * dim * size,
                batch * attention_flops(config, context - 1, 1, maker.window),
                partial(_decode, maker, batch, context, grid.block_size),
            )  # fmt: skip
    for rows in grid.rows:
        for prefix in grid.prefixes:
            yield KernelCase(
                "prefill_attention", f"{rows} after {prefix}",
                2 * (rows * heads + maker.read(prefix, rows) * kv_heads) * dim * size,
                attention_flops(config, prefix, rows, maker.window),
                partial(_prefill, maker, rows, prefix, grid.block_size),
            )  # fmt: skip
    for rows in grid.batches:
        yield KernelCase(
            "draw", f"{rows} x {vocab}", rows * vocab * size, 0, partial(_draw, maker, rows)
        )
    for name, (out, width) in {**linear_shapes(config), "lm_head": (vocab, hidden)}.items():
        for rows in grid.batches if name == "lm_head" else grid.counts:
            yield KernelCase(
                "linear", f"{name} {out} x {width}, {rows} rows",
                (out * width + rows * (out + width)) * size, 2 * rows * out * width,
                partial(_product, maker, rows, out, width),
            )  # fmt: skip


def _norm(maker: Maker, rows: int) -> Call:
    width, eps = maker.config.hidden_size, maker.config.rms_norm_eps
    x, weight = maker.normal(rows, width), scaled_norm_weight(maker.ones(width))
    return lambda: rms_norm(x, weight, eps)


def _silu(maker: Maker, rows: int) -> Call:
    gate_up = maker.normal(rows, 2 * maker.config.intermediate_size)
    return lambda: silu_and_mul(gate_up)


def _rope(maker: Maker, rows: int, block_size: int) -> Call:
    """Norm and rotation of queries and keys, then the write of K and V."""
    config = maker.config
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    qkv = maker.normal(rows, heads + 2 * kv_heads, dim)
    cos, sin = (table[:rows].unsqueeze(1) for table in maker.tables(rows))
    turning = heads + kv_heads
    norm: Tensor | None = None
    if config.qk_norm:
        norm = scaled_norm_weight(maker.ones(dim).expand(turning, -1))
    keys, values = _cache(maker, blocks_of(rows, block_size), block_size)
    places = torch.arange(rows)

    def call() -> None:
        query_key = qkv[:, :turning]
        if norm is not None:
            query_key = rms_norm_fp32(query_key, norm, config.rms_norm_eps)
        query_key = apply_rotary(query_key, cos, sin).to(maker.dtype)
        write_kv(query_key[:, heads:], qkv[:, turning:], keys, values, places)

    return call


def _cache(maker: Maker, blocks: int, block_size: int) -> tuple[Tensor, Tensor]:
    shape = (maker.config.num_kv_heads, blocks, block_size, maker.config.head_dim)
    return maker.cache(*shape), maker.cache(*shape)


def _decode(maker: Maker, batch: int, context: int, block_size: int) -> Call:
    rows = np.arange(batch, dtype=np.int64)
    tables, blocks = _tables(batch, context, block_size)
    spans = QuerySpans(rows, np.full_like(rows, context - 1), None, tables)
    return _attention(maker, spans, batch, blocks, block_size)


def _prefill(maker: Maker, rows: int, prefix: int, block_size: int) -> Call:
    tables, blocks = _tables(1, prefix + rows, block_size)
    first, start, count = np.array([[0], [prefix], [rows]], np.int64)
    return _attention(maker, QuerySpans(first, start, count, tables), rows, blocks, block_size)


def _tables(sequences: int, longest: int, block_size: int) -> tuple[IntArray, int]:
    """Block tables of sequences with as many whole tiles each, and the number of blocks."""
    width = blocks_of(longest, KV_TILE) * (KV_TILE // block_size)
    blocks = sequences * width
    return np.arange(blocks, dtype=np.int64).reshape(sequences, width), blocks


def _attention(maker: Maker, spans: QuerySpans, rows: int, blocks: int, block_size: int) -> Call:
    config = maker.config
    shape = CacheShape(
        config.num_kv_heads, blocks, block_size, config.head_dim, config.num_heads,
        maker.dtype, exact=maker.dtype == torch.float32, window=maker.window,
    )  # fmt: skip
    keys, values = _cache(maker, blocks, block_size)
    batches = ReferenceAttention().plan(spans, shape, maker.device)
    query = maker.normal(rows, config.num_heads, config.head_dim)
    return lambda: paged_attention(query, keys, values, batches, config.head_dim**-0.5)


def _draw(maker: Maker, rows: int) -> Call:
    """Rows drawn at temperature 1."""
    logits = maker.normal(rows, maker.config.vocab_size)
    ones, zeros = np.ones(rows, np.float32), np.zeros(rows, np.uint64)
    keys = draw_keys(zeros, zeros, np.arange(rows, dtype=np.uint64))
    wanted = SamplingRows(ones, np.zeros(rows, np.int64), ones, keys)
    return lambda: sample(logits, wanted, GREEDY_TEMPERATURE)


def _product(maker: Maker, rows: int, out: int, width: int) -> Call:
    specification = LinearSpecification(width, (out,), ("weight",))
    layer, x = Linear(specification, maker.weight(out, width)), maker.normal(rows, width)
    layer.pack()
    return lambda: layer(x)
