"""The cases of ``penstock bench kernels`` on a CUDA device: each kernel of ``kernels/gpu``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import torch

from penstock.kernels.gpu.activation import gated_product
from penstock.kernels.gpu.attention_arguments import DecodeBatch, HeadInputs, Scores, layer_cache
from penstock.kernels.gpu.decode_workspace import decode_workspace
from penstock.kernels.gpu.few_rows_linear import MOST_ROWS, few_rows_linear
from penstock.kernels.gpu.few_rows_linear import fits as fits_few_rows
from penstock.kernels.gpu.norm import add_rms_norm, rms_norm
from penstock.kernels.gpu.prefill_attention import QUERY_TILE
from penstock.kernels.gpu.rope_cache import rope_and_cache
from penstock.kernels.gpu.shared_prefix import shared_prefix
from penstock.kernels.gpu.skinny_linear import fits, skinny_linear
from penstock.kernels.gpu.slots import embed, scatter
from penstock.kernels.gpu.widen_cache import Contexts
from penstock.loadtest.kernel_benches.eager_kernels import eager_cases
from penstock.loadtest.kernel_benches.kernel_case import (
    Grid,
    KernelCase,
    Maker,
    NotedCall,
    blocks_of,
)
from penstock.loadtest.kernel_benches.sampler_kernels import sampler_cases
from penstock.loadtest.roofline.decoder_cost import attention_flops, linear_shapes
from penstock.services.worker.gpu.attention_choice import (
    TritonDecodeAttention,
    choose_decode_attention,
    choose_prefill_attention,
    choose_prefix_attention,
)
from penstock.services.worker.gpu.compressed_layers import compress_all
from penstock.services.worker.gpu.kernel_choice import not_hopper
from penstock.services.worker.gpu.layer_products import (
    WIDE_HOPPER_ROWS,
    LayerProducts,
    LibraryProducts,
    choose_gated,
    choose_products,
)
from penstock.services.worker.gpu.widened_prefill import choose_widened_prefill
from penstock.services.worker.gpu.workspace import make_workspace
from penstock.services.worker.models.dense_form import allocate_dense

Call = Callable[[], object]
_CHANGES = 1024
"""State entries that a large step changes."""


def gpu_cases(maker: Maker, grid: Grid) -> Iterator[KernelCase]:
    """All cases. Their memory is taken by ``make`` alone."""
    config, size = maker.config, maker.dtype.itemsize
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    fused = heads + 2 * kv_heads
    yield KernelCase("scatter", f"{_CHANGES} changes", 12 * _CHANGES, 0, partial(_scatter, maker))
    for rows in grid.counts:
        name = f"{rows} rows"
        yield KernelCase("embed", name, 2 * rows * hidden * size, 0, partial(_embed, maker, rows))
        yield KernelCase("rms_norm", name, 2 * rows * hidden * size, 0, partial(_norm, maker, rows))
        yield KernelCase(
            "add_rms_norm", name, 4 * rows * hidden * size, 0, partial(_add_norm, maker, rows)
        )
        yield KernelCase(
            "silu_and_mul", name, 3 * rows * inner * size, 0, partial(_silu, maker, rows)
        )
    for rows in grid.rows:
        yield KernelCase(
            "rope_and_cache", f"{rows} rows", 2 * rows * fused * dim * size, 0,
            partial(_rope, maker, rows, grid.block_size),
        )  # fmt: skip
    yield from _attention(maker, grid)
    yield from sampler_cases(maker, grid)
    yield from _products(maker, grid)
    yield from eager_cases(maker, grid)


def _attention(maker: Maker, grid: Grid) -> Iterator[KernelCase]:
    """Decode, with and without a prefix that rows share, and prefill."""
    config, size = maker.config, maker.dtype.itemsize
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    fused = heads + 2 * kv_heads
    for batch in grid.batches:
        for context in grid.contexts:
            cached = 2 * batch * (maker.read(context, 1) - 1) * kv_heads * maker.cached_head
            moved = cached + batch * (fused + 2 * kv_heads + heads) * dim * size
            yield KernelCase(
                "decode_attention", f"{batch} x {context}", moved,
                batch * attention_flops(config, context, 1, maker.window),
                partial(_decode, maker, batch, context, grid.block_size),
            )  # fmt: skip
    for batch in grid.batches if maker.kv_kind == "auto" and not maker.window else ():
        for prefix in grid.prefixes:
            common = prefix - prefix % grid.block_size
            if common:
                yield KernelCase(
                    "prefix_attention", f"{batch} rows share {common}",
                    2 * common * kv_heads * maker.cached_head + batch * heads * dim * (size + 4),
                    4 * batch * heads * dim * common,
                    partial(_shared_prefix, maker, batch, common, grid.block_size),
                )  # fmt: skip
    for rows in grid.rows:
        for prefix in grid.prefixes:
            cached = 2 * maker.read(prefix, rows) * kv_heads * maker.cached_head
            moved = 2 * rows * heads * dim * size + cached
            yield KernelCase(
                "prefill_attention", f"{rows} after {prefix}", moved,
                attention_flops(config, prefix, rows, maker.window),
                partial(_prefill, maker, rows, prefix, grid.block_size),
            )  # fmt: skip


def _products(maker: Maker, grid: Grid) -> Iterator[KernelCase]:
    """The layer's products of one row and of a few; those of some dozens, from plain weights and
    from compressed ones; cuBLAS, and the gated product as many rows choose it, at every number of
    rows."""
    size, config = maker.dtype.itemsize, maker.config
    hidden, inner = config.hidden_size, config.intermediate_size
    numbers = sum(out * width for out, width in linear_shapes(config).values())
    for rows in grid.counts:
        if rows > WIDE_HOPPER_ROWS[1]:
            continue
        yield KernelCase(
            "layer, plain weights", f"{rows} rows", numbers * size, 2 * rows * numbers,
            partial(_layer, maker, rows, compressed=False),
        )  # fmt: skip
        if maker.dtype == torch.bfloat16 and not not_hopper():
            yield KernelCase(
                "layer, compressed", f"{rows} rows", numbers * 3 // 2, 2 * rows * numbers,
                partial(_layer, maker, rows, compressed=True),
            )  # fmt: skip
    for rows in grid.counts:
        yield KernelCase(
            "gated product", f"{rows} rows", (2 * inner * hidden + rows * (hidden + inner)) * size,
            4 * rows * hidden * inner, partial(_gated, maker, rows),
        )  # fmt: skip
    shapes = linear_shapes(config)
    if maker.dtype != torch.float16:
        for name, (out, width) in shapes.items():
            if fits(width, out):
                yield KernelCase(
                    "skinny_linear", f"{name} {out} x {width}", out * width * size,
                    2 * out * width, partial(_fused, skinny_linear, maker, name, 1, out, width),
                )  # fmt: skip
            if not fits_few_rows(width, out // 2 if name == "gate_up" else out):
                continue
            for rows in grid.counts:
                if rows <= MOST_ROWS:
                    yield KernelCase(
                        "few_rows_linear", f"{name} {out} x {width}, {rows} rows",
                        (out * width + rows * (out + width)) * size, 2 * rows * out * width,
                        partial(_fused, few_rows_linear, maker, name, rows, out, width),
                    )  # fmt: skip
    head = (maker.config.vocab_size, maker.config.hidden_size)
    for name, (out, width) in {**shapes, "lm_head": head}.items():
        for rows in grid.batches if name == "lm_head" else grid.counts:
            yield KernelCase(
                "torch.mm", f"{name} {out} x {width}, {rows} rows",
                (out * width + rows * (out + width)) * size, 2 * rows * out * width,
                partial(_product, maker, rows, out, width),
            )  # fmt: skip


def _scatter(maker: Maker) -> Call:
    state = maker.integers([0] * 4 * _CHANGES)
    changes = maker.integers([*range(0, 4 * _CHANGES, 4), *range(_CHANGES)])
    return lambda: scatter(state, changes, _CHANGES)


def _embed(maker: Maker, rows: int) -> Call:
    config = maker.config
    table = maker.normal(config.vocab_size, config.hidden_size)
    step = max(1, config.vocab_size // rows)
    tokens = maker.integers([row * step % config.vocab_size for row in range(rows)])
    slots = maker.integers([0] * rows)
    out = maker.normal(rows, config.hidden_size)
    return lambda: embed(table, tokens, slots, slots, out)


def _norm(maker: Maker, rows: int) -> Call:
    width, eps = maker.config.hidden_size, maker.config.rms_norm_eps
    x, weight = maker.normal(rows, width), maker.ones(width)
    out = torch.empty_like(x)
    return lambda: rms_norm(x, weight, eps, out)


def _add_norm(maker: Maker, rows: int) -> Call:
    """The sum stays finite over all repetitions: nothing is added."""
    width, eps = maker.config.hidden_size, maker.config.rms_norm_eps
    residual, weight = maker.normal(rows, width), maker.ones(width)
    x, out = torch.zeros_like(residual), torch.empty_like(residual)
    return lambda: add_rms_norm(x, residual, weight, eps, out)


def _silu(maker: Maker, rows: int) -> Call:
    inner = maker.config.intermediate_size
    gate_up, out = maker.normal(rows, 2 * inner), maker.normal(rows, inner)
    return lambda: gated_product(gate_up, out)


class _Paged:
    """A cache of ``count`` sequences of ``length`` positions, with tables and head norms."""

    def __init__(self, maker: Maker, count: int, length: int, block_size: int) -> None:
        config = maker.config
        width = blocks_of(length, block_size)
        shape = (count * width, config.num_kv_heads, block_size, config.head_dim)
        self.keys, self.values = maker.cache(*shape), maker.cache(*shape)
        order = torch.randperm(count * width, generator=torch.Generator().manual_seed(0))
        self.table = order.view(count, width).to(torch.int32).to(maker.device)
        half = config.head_dim // 2
        cos, sin = maker.tables(length)
        norm = maker.ones(config.head_dim) if config.qk_norm else None
        self.heads = HeadInputs(cos[:, :half].contiguous(), sin[:, half:].contiguous(), norm, norm)


def _rope(maker: Maker, rows: int, block_size: int) -> Call:
    config = maker.config
    heads, fused = config.num_heads, config.num_heads + 2 * config.num_kv_heads
    paged = _Paged(maker, 1, rows, block_size)
    qkv = maker.normal(rows, fused, config.head_dim)
    query = maker.normal(rows, heads, config.head_dim)
    slots, positions = maker.integers([0] * rows), maker.integers(list(range(rows)))
    cache, eps = layer_cache(paged.keys, paged.values), config.rms_norm_eps
    return lambda: rope_and_cache(
        qkv, slots, positions, paged.table, paged.heads, query, cache, eps
    )


def _decode(maker: Maker, batch: int, context: int, block_size: int) -> Call:
    """Decode attention by the kernel that an executor here would choose; what a step plans once for
    all its layers is done before."""
    config = maker.config
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    paged = _Paged(maker, batch, context + 1, block_size)
    qkv, out = maker.normal(batch, heads + 2 * kv_heads, dim), maker.normal(batch, heads, dim)
    rows, position = maker.integers(list(range(batch))), maker.integers([context] * batch)
    keys, values, eps = paged.keys[None], paged.values[None], config.rms_norm_eps
    scores = [Scores(dim**-0.5, maker.window)]
    space = decode_workspace(batch, heads, kv_heads, dim, maker.device)
    choice = choose_decode_attention(
        keys, values, heads, batch, config.qk_norm, eps,
        TritonDecodeAttention(keys, values, space, eps, None, scores), None, scores,
    )  # fmt: skip
    step = DecodeBatch(rows, position, paged.table)
    choice.kernels.plan(step)
    call = partial(choice.kernels, 0, qkv, step, paged.heads, out)
    return NotedCall(call, choice.summary)


def _shared_prefix(maker: Maker, batch: int, common: int, block_size: int) -> Call:
    """Prefix attention by the kernel that an executor on this device would choose."""
    config = maker.config
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    paged = _Paged(maker, batch, common + 1, block_size)
    paged.table[:, : common // block_size] = paged.table[0, : common // block_size].clone()
    qkv, rows = maker.normal(batch, heads + 2 * kv_heads, dim), maker.integers(list(range(batch)))
    position = maker.integers([common] * batch)
    prefix = shared_prefix(maker.integers([0]), position.clone(), batch, heads, kv_heads, dim)
    choice = choose_prefix_attention(
        paged.keys[None], paged.values[None], heads, config.qk_norm, config.rms_norm_eps, prefix,
        [Scores(dim**-0.5)],
    )  # fmt: skip
    if choice.kernels is None:
        raise ValueError(f"no kernel reads shared prefixes: {choice.reason}")
    step = DecodeBatch(rows, position, paged.table)
    call = partial(choice.kernels, 0, qkv, step, paged.heads)
    return NotedCall(call, choice.summary)


def _prefill(maker: Maker, rows: int, prefix: int, block_size: int) -> Call:
    """Prefill attention by the kernel that an executor on this device would choose."""
    config = maker.config
    paged = _Paged(maker, 1, prefix + rows, block_size)
    queries = maker.normal(rows, config.num_heads, config.head_dim)
    out = torch.empty_like(queries)
    starts = range(0, rows, QUERY_TILE)
    tiles = torch.stack(
        [
            maker.integers(list(starts)),
            maker.integers([min(QUERY_TILE, rows - start) for start in starts]),
            maker.integers([0] * len(starts)),
            maker.integers([prefix + start for start in starts]),
        ]
    )
    scores = [Scores(config.head_dim**-0.5, maker.window)]
    step = queries, tiles, len(starts), paged.table, out
    widened = choose_widened_prefill(
        [layer_cache(paged.keys, paged.values)], queries, paged.table, scores
    )
    if widened.kernels is not None:
        units = -(-(prefix + rows) // widened.kernels.unit)
        if units <= widened.kernels.units:
            contexts = Contexts(maker.integers([0, units]), maker.integers([0]))
            call = partial(widened.kernels, 0, *step, contexts)
            return NotedCall(call, f"{widened.summary}, from widened keys and values")
    choice = choose_prefill_attention(paged.keys[None], paged.values[None], queries, scores)
    return NotedCall(partial(choice.kernels, 0, *step), choice.summary)


def _fused(
    linear: Callable[..., None], maker: Maker, name: str, rows: int, out: int, width: int
) -> Call:
    """As the layer calls it: norm before, gate or sum after."""
    gated = name == "gate_up"
    norm = maker.ones(width) if name in ("qkv", "gate_up") else None
    x, weight = maker.normal(rows, width, scale=1e-3), maker.weight(out, width)
    target = torch.zeros_like(maker.normal(rows, out // 2 if gated else out))
    eps = maker.config.rms_norm_eps
    return lambda: linear(
        x, weight, None, target, norm_weight=norm, eps=eps, gated=gated, add=norm is None
    )


def _gated(maker: Maker, rows: int) -> Call:
    """As a layer of many rows on this device computes it, the gate in the product or behind it."""
    config = msgspec.structs.replace(maker.config, num_layers=1, vocab_size=16)
    weights = allocate_dense(config, maker.dtype, maker.device)
    weights.layers[0].linears.up.weight.copy_(
        maker.weight(2 * config.intermediate_size, config.hidden_size)
    )
    space = make_workspace(config, rows, 1, maker.dtype, maker.device)
    space.normed.copy_(maker.normal(rows, config.hidden_size))
    choice = choose_gated(weights, space)
    products = LibraryProducts(weights, space, config.rms_norm_eps, choice.kernels)
    gated = choice.kernels is not None and choice.kernels.pays(rows)
    note = choice.summary if gated or choice.kernels is None else "library: faster for so many rows"
    return NotedCall(partial(products.gate_up, 0, rows), note)


def _layer(maker: Maker, rows: int, *, compressed: bool) -> Call:
    """A layer but for its attention: by the kernels for Hopper, or else by the library's."""
    config = msgspec.structs.replace(maker.config, num_layers=1, vocab_size=16)
    weights = allocate_dense(config, maker.dtype, maker.device)
    layer, eps = weights.layers[0], config.rms_norm_eps
    for linear in layer.linears:
        linear.weight.copy_(maker.weight(*linear.weight.shape))
    for norm in (layer.input_norm, layer.post_norm, weights.norm):
        norm.fill_(1.0)
    space = make_workspace(config, max(rows, WIDE_HOPPER_ROWS[1]), 1, maker.dtype, maker.device)
    for x in (space.residual, space.attention_output):
        x.copy_(maker.normal(*x.shape))
    if compressed:
        compress_all(weights)
    choice = choose_products(weights, space, eps, compressed)
    products: LayerProducts = LibraryProducts(weights, space, eps)
    if choice.kernels is not None and rows >= choice.kernels.bounds[0]:
        products = choice.kernels
    products.begin(rows)

    def call() -> None:
        products.qkv(0, rows)
        products.output(0, rows)
        products.gate_up(0, rows)
        products.down(0, rows)

    return NotedCall(call, choice.summary)


def _product(maker: Maker, rows: int, out: int, width: int) -> Call:
    x, weight = maker.normal(rows, width), maker.weight(out, width)
    result = maker.normal(rows, out)
    return lambda: torch.mm(x, weight.t(), out=result)
