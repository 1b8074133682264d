"""The operations around products as plain torch, launch by launch: what fused kernels replace.

Each is written as Hugging Face transformers writes it (``Qwen3RMSNorm``, ``apply_rotary_pos_emb``,
``Qwen3MLP``, and a cache that is written by index), in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from penstock.loadtest.kernel_benches.kernel_case import Grid, KernelCase, Maker

Call = Callable[[], object]


def eager_cases(maker: Maker, grid: Grid) -> Iterator[KernelCase]:
    """Cases with the sizes and the bytes of the kernels of the same names."""
    config, size = maker.config, maker.dtype.itemsize
    hidden, inner = config.hidden_size, config.intermediate_size
    fused = config.num_heads + 2 * config.num_kv_heads
    for rows in grid.counts:
        name = f"{rows} rows"
        yield KernelCase(
            "eager rms_norm", name, 2 * rows * hidden * size, 0, partial(_norm, maker, rows)
        )
        yield KernelCase(
            "eager add_rms_norm", name, 4 * rows * hidden * size, 0, partial(_add_norm, maker, rows)
        )
        yield KernelCase(
            "eager silu_and_mul", name, 3 * rows * inner * size, 0, partial(_silu, maker, rows)
        )
    for rows in grid.rows:
        yield KernelCase(
            "eager rope_and_cache", f"{rows} rows", 2 * rows * fused * config.head_dim * size, 0,
            partial(_rope, maker, rows),
        )  # fmt: skip


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [..., D]; weight: [D]."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [N, H, D]; cos, sin: [N, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def plain_tables(maker: Maker, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin of each position, both halves alike: [P, D] fp32."""
    cos, sin = maker.tables(positions)
    second = sin[:, sin.shape[1] // 2 :]
    return cos, torch.cat((second, second), dim=-1)


def _norm(maker: Maker, rows: int) -> Call:
    width, eps = maker.config.hidden_size, maker.config.rms_norm_eps
    x, weight = maker.normal(rows, width), maker.ones(width)
    return lambda: rms_norm(x, weight, eps)


def _add_norm(maker: Maker, rows: int) -> Call:
    width, eps = maker.config.hidden_size, maker.config.rms_norm_eps
    residual, weight = maker.normal(rows, width), maker.ones(width)
    x = torch.zeros_like(residual)

    def call() -> Tensor:
        residual.copy_(residual + x)
        return rms_norm(residual, weight, eps)

    return call


def _silu(maker: Maker, rows: int) -> Call:
    gate_up = maker.normal(rows, 2 * maker.config.intermediate_size)

    def call() -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    return call


def _rope(maker: Maker, rows: int) -> Call:
    config = maker.config
    heads, kv_heads, eps = config.num_heads, config.num_kv_heads, config.rms_norm_eps
    qkv = maker.normal(rows, heads + 2 * kv_heads, config.head_dim)
    cos, sin = (table.to(maker.dtype) for table in plain_tables(maker, rows))
    keys, values = (maker.normal(rows, kv_heads, config.head_dim) for _ in range(2))
    slots = torch.arange(rows, device=maker.device)
    weight = maker.ones(config.head_dim) if config.qk_norm else None

    def call() -> Tensor:
        query, key, value = qkv[:, :heads], qkv[:, heads:-kv_heads], qkv[:, -kv_heads:]
        if weight is not None:
            query, key = rms_norm(query, weight, eps), rms_norm(key, weight, eps)
        keys.index_copy_(0, slots, rotate(key, cos, sin))
        values.index_copy_(0, slots, value)
        return rotate(query, cos, sin)

    return call
