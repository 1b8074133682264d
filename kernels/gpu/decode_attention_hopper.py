"""Attention of decode rows on Hopper GPUs, compiled and started: the host's side.

The result is that of ``penstock.kernels.gpu.decode_attention``; the reference of both is the plain
computation of ``penstock.kernels.attention``. A step's work is planned once
(``decode_plan``), then computed in every layer by programs with equal shares of it
(``decode_splits_hopper``).

Written in Gluon, Triton's language of explicit layouts, which is experimental: with a Triton that
lacks it or has changed it, importing this module or making a ``HopperDecodeAttention`` fails.
Compute capability 9.0 alone. The interpreter cannot run it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from penstock.kernels.gpu.attention_arguments import (
    DecodeBatch,
    HeadInputs,
    LayerTensors,
    binary_scales,
)
from penstock.kernels.gpu.decode_plan import FIELDS, PROGRAMS_EACH, plan_kernel
from penstock.kernels.gpu.decode_splits_hopper import hopper_decode_kernel
from penstock.kernels.gpu.shared_prefix import SharedPrefix, parts_for
from penstock.kernels.gpu.side_by_side import side_by_side

MOST_ROWS = 4096
"""Rows of a step that one program of the plan can hold."""
_MOST_SHARED = 16
_LEAST_BITS = 5


_KEYS = 32
"""Positions in a tile."""


class Shape(NamedTuple):
    warps: int
    stages: int
    """Tiles under way."""
    programs: int


# The fastest of sixteen on an NVIDIA H200 (torch 2.11.0+cu130, triton 3.6.0, 2026-11-22), heads of
# 128, 8 KV heads; µs a layer with 16 and with 32 heads, the Triton kernel behind them:
#   1 x 512                   5.2,  6.8    9.0, 10.5
#   1 x 4,096                13.1, 19.9   14.5, 16.7
#   256 rows of 100 to 2,000  272,  274    314,  315
# Behind a shared prefix of 2,048 positions, with some 96 of their own and between two products, 256
# rows take 63 µs with 32 heads and 55 with 16, prefix included (2026-11-23); ten other shapes take
# 3 to 110 % more, because a multiprocessor that has ended its share of the prefix takes as many of
# these programs as it has room for, and so no fewer than fill all should there be.
MANY_ROWS = 8
_MANY = Shape(1, 2, 792)
_FEW = Shape(1, 3, 528)
_PREFIXED = Shape(1, 1, 1056)
MOST_SHARED_BY_FEW = 2
"""Query heads for a KV head up to which steps of fewer than ``MANY_ROWS`` rows gain beside products
of Triton: one row of Qwen3-8B, with four, takes 4.47 ms with this kernel and 4.32 with the Triton
kernel, although this one alone is faster; presumably it leaves less room for the programs of the
next product, which read weights meanwhile. Beside ``rows_linear_hopper`` all steps gain: 4.19."""


def shape_for(rows: int, prefixed: bool = False) -> Shape:
    if prefixed:
        return _PREFIXED
    return _MANY if rows >= MANY_ROWS else _FEW


def why_not(dtype: torch.dtype, dim: int, block_size: int, shared: int, max_rows: int) -> str:
    """Why the kernel cannot attend over such a cache; empty if it can. shared: Hq / Hkv."""
    if dtype != torch.bfloat16:
        return f"takes bfloat16, not {str(dtype).removeprefix('torch.')}"
    if dim not in (64, 128):
        return f"takes heads of 64 and 128, not {dim}"
    if block_size < 8 or block_size & (block_size - 1):
        return f"takes blocks of 8 and more in powers of two, not {block_size}"
    if shared > _MOST_SHARED:
        return f"takes up to {_MOST_SHARED} heads for a KV head, not {shared}"
    if max_rows > MOST_ROWS:
        return f"takes up to {MOST_ROWS} rows, not {max_rows}"
    return ""


def _plan_rows(rows: int) -> int:
    """Rows that the plan of ``rows`` rows is compiled for."""
    return max(1 << _LEAST_BITS, int(triton.next_power_of_2(rows)))


def _combine_layout(shared: int, dim: int, warps: int) -> tuple[int, Any]:
    """Parts that are added up at once, and their layout [part, query, column]."""
    queries = triton.next_power_of_2(shared)
    per_thread = max(1, queries * dim // (32 * warps))
    vector = min(4, per_thread)
    lanes = min(32, dim // vector)
    across = min(warps, dim // vector // lanes)
    layout = gl.BlockedLayout(
        [1, 1, vector], [1, 32 // lanes, lanes], [1, warps // across, across], [2, 1, 0]
    )
    return max(2, min(16, 64 // per_thread)), layout


class DecodeConstants(NamedTuple):
    """The kernel's constants, in its order."""

    heads: int
    kv_heads: int
    half: int
    block_size: int
    keys: int
    stages: int
    parts: int
    """Parts of a row that are added up at once, and in which layout."""
    combine: Any
    norm: bool


class _Ready(NamedTuple):
    """What is launched for one shape."""

    shape: Shape
    kernel: Any
    constants: DecodeConstants
    boxes: list[tuple[TensorDescriptor, TensorDescriptor]]
    """The caches of each layer."""


class HopperDecodeAttention:
    """The kernels, compiled, for caches whose addresses never change, with their workspace.

    Padding, a slot of -1, may stand behind the rows of a step alone: between them it would be read
    as a slot.

    The caches' descriptors are made once, and a launch goes past Triton's look-up of the compiled
    kernel. A descriptor is copied into every launch, and so into the graphs that record it.
    """

    def __init__(
        self,
        keys: LayerTensors,
        values: LayerTensors,
        heads: int,
        max_rows: int,
        norm: bool,
        eps: float,
        prefix: SharedPrefix | None = None,
        scales: Sequence[float] = (),
    ) -> None:
        """keys, values: of each layer; heads: Hq; max_rows: of a step, at least 1; norm: whether
        queries and keys are normed, with eps; prefix: what the rows of a step may share; scales:
        of each layer's scores, by default 1 / sqrt(D).

        Raises what Triton raises where it cannot compile or load the kernels.
        """
        _, self._kv_heads, _, self._dim = keys[0].shape
        self._heads = heads
        self._eps, self._scales = eps, binary_scales(scales, len(keys), self._dim)
        self._caches = list(zip(keys, values, strict=True))
        self._shared = heads // self._kv_heads
        self.least_rows = 1 if self._shared <= MOST_SHARED_BY_FEW else MANY_ROWS
        self._prefix = prefix
        shapes = {shape_for(rows) for rows in (1, max_rows)} | ({_PREFIXED} if prefix else set())
        programs = max(shape.programs for shape in shapes)
        device, parts = keys[0].device, programs * 2 * self._shared
        self._plan = torch.empty(programs * FIELDS, dtype=torch.int32, device=device)
        self._partial = torch.empty(parts * self._dim, dtype=torch.float32, device=device)
        self._sums = torch.empty(parts * 2, dtype=torch.float32, device=device)
        suffix_rows = max_rows * heads if prefix else 0
        self.suffix = torch.empty(suffix_rows * self._dim, dtype=torch.float32, device=device)
        """The part of each (row, head) from its suffix, the positions behind a shared prefix."""
        self._suffix_sums = torch.empty(suffix_rows * 2, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(max_rows * self._kv_heads, dtype=torch.int32, device=device)
        """Programs that have left their part of each (row, KV head); zero between launches."""
        self._plans = self._prepare_plans(max_rows)
        ready = side_by_side(lambda shape: self._prepare(shape, norm), shapes)
        self._ready = dict(zip(shapes, ready, strict=True))

    def _prepare_plans(self, max_rows: int) -> dict[int, Any]:
        """Compiled for up to so many rows, a power of two."""
        int32 = torch.int32
        lengths, plans = int32 if self._prefix else None, {}
        for rows in (1 << bits for bits in range(_LEAST_BITS, _plan_rows(max_rows).bit_length())):
            plans[rows] = plan_kernel.warmup(
                int32, int32, lengths, int32, 1, 1, 1, *self._plan_constants(rows), grid=(1,),
                num_warps=4,
            )  # fmt: skip
            plans[rows][1, 1, 1]  # loads it
        return plans

    def _prepare(self, shape: Shape, norm: bool) -> _Ready:
        dtype, block_size = self._caches[0][0].dtype, self._caches[0][0].shape[2]
        layout = gl.NVMMASharedLayout(self._dim, 16, 2)
        box = [min(block_size, _KEYS), self._dim // 2]

        def described(cache: Tensor) -> TensorDescriptor:
            return TensorDescriptor.from_tensor(cache.view(-1, self._dim), box, layout)

        boxes = [(described(keys), described(values)) for keys, values in self._caches]
        parts, combine = _combine_layout(self._shared, self._dim, shape.warps)
        constants = DecodeConstants(
            heads=self._heads,
            kv_heads=self._kv_heads,
            half=self._dim // 2,
            block_size=block_size,
            keys=_KEYS,
            stages=shape.stages,
            parts=parts,
            combine=combine,
            norm=norm,
        )
        int32, fp32, weight = torch.int32, torch.float32, dtype if norm else None
        of_prefix = (int32, fp32, fp32, 1, fp32, fp32) if shape == _PREFIXED else (None,) * 6
        kernel = hopper_decode_kernel.warmup(
            dtype, int32, int32, int32, int32, *boxes[0], dtype, dtype, fp32, fp32, weight, weight,
            dtype, fp32, fp32, int32, *of_prefix, self._scales[0], self._eps, 1, *constants,
            grid=(1,), num_warps=shape.warps, launch_pdl=True,
        )  # fmt: skip
        kernel[shape.programs, 1, 1]
        return _Ready(shape, kernel, constants, boxes)

    def _plan_constants(self, rows: int) -> tuple[int, ...]:
        return self._kv_heads, _KEYS, rows, PROGRAMS_EACH

    def plan(self, batch: DecodeBatch, prefixed: bool = False) -> None:
        """Once a step, ahead of all its other kernels; good for the layers' calls for these rows.

        Arguments as those of a call.
        """
        rows, last_position, _ = batch
        programs = shape_for(len(rows), prefixed).programs
        room = _plan_rows(len(rows))
        self._plans[room][triton.cdiv(programs, PROGRAMS_EACH), 1, 1](
            rows, last_position, self._prefix and self._prefix.lengths, self._plan, len(rows),
            int(prefixed), programs, *self._plan_constants(room),
        )  # fmt: skip

    def __call__(
        self,
        layer: int,
        qkv: Tensor,
        batch: DecodeBatch,
        heads: HeadInputs,
        out: Tensor,
        prefixed: bool = False,
    ) -> None:
        """As ``decode_attention`` over the caches of ``layer``; all aligned to 16 bytes, and
        ``plan`` called for the same rows. prefixed: add what ``prefix_attention`` leaves for these
        rows; its kernel must be the one directly ahead on the stream, because this one does not
        wait for QKV itself."""
        count = len(batch.rows)
        ready = self._ready[shape_for(count, prefixed)]
        ready.kernel[ready.shape.programs, 1, 1](
            qkv, self._plan, *batch, *ready.boxes[layer], *self._caches[layer], *heads, out,
            self._partial, self._sums, self.arrived, *self._of_prefix(count, prefixed),
            self._scales[layer], self._eps, batch.table.stride(0), *ready.constants,
        )  # fmt: skip

    def _of_prefix(self, rows: int, prefixed: bool) -> tuple[Any, ...]:
        """The kernel's arguments about the prefix; ``None`` where it has none."""
        if not prefixed or self._prefix is None:
            return (None,) * 6
        _, lengths, partial, sums = self._prefix
        parts = parts_for(rows, self._heads, self._kv_heads)
        return lengths, partial, sums, parts, self.suffix, self._suffix_sums
