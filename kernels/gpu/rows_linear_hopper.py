"""Linear layers of decode steps on Hopper's matrix unit, for some dozens of rows.

    out = x Wᵀ + b                                        plain
    out = activation(x W_gateᵀ) * (x W_upᵀ)               ``gated``, W = [W_gate; W_up]
    parts of x Wᵀ + b, whose sum is it                    ``splits`` of the width, in fp32

For so few rows a product is bound by reading W, and for narrow layers by how soon the first of it
comes: a program asks for its first tiles of W before the kernel ahead of it has ended
(``early_launch``), and for those of x after that. Tiles come by the tensor memory accelerator,
``stages`` of them under way, and are multiplied from shared memory. Where a layer has too few
columns to keep the device busy, programs share the width; what reads their parts next
(``norm.add_rms_norm``) adds them up, always in the same order. References:
``penstock.kernels.linear`` and ``activation``.

Written in Gluon, Triton's language of explicit layouts, which is experimental: with a Triton that
lacks it or has changed it, importing this module or making a ``HopperLinear`` fails. Compute
capability 9.0 alone. The interpreter cannot run it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from penstock.kernels.gpu.rows_tiles_hopper import (
    exact_sum_of_slabs,
    sum_of_slabs,
    write_columns,
)
from penstock.kernels.gpu.side_by_side import side_by_side

_SLAB_BYTES = 128
"""Of a row of a tile: the widest swizzle of shared memory."""
DTYPES = (torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
"""Of both x and W, with a scale for each row of either."""
TILES = (8, 16, 32, 64, 128)
"""Rows of x that kernels are compiled for."""
_SHARED_BYTES = 227 * 1024
_MOST_STAGES, _GATED_STAGES = 16, 8
_LEAST_PROGRAMS = 64
_MOST_SLABS = 96
# A group of four warps begins with 96 or 128 registers each and takes from the fetching ones.
_REGISTERS = {8: 96, 16: 96, 32: 96, 64: 96, 128: 128}


class Shape(NamedTuple):
    splits: int
    """Programs that share the width."""
    stages: int
    """Tiles under way."""


@gluon.jit
def _fetch_weights(
    weight_box, weights, ready, stage, slab, column,
    OUTS: gl.constexpr, PART: gl.constexpr, HALVES: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Start to bring a tile of W. ``BYTES``: of the tile of x, too."""
    SLAB: gl.constexpr = weight_box.block_type.shape[1]
    mbarrier.expect(ready.index(stage), BYTES)
    for half in gl.static_range(HALVES):
        tma.async_copy_global_to_shared(
            weight_box, [half * OUTS + column, slab * SLAB], ready.index(stage),
            weights.index(stage).slice(half * PART, PART),
        )  # fmt: skip


@gluon.jit
def _fetch_x(x_box, xs, ready, stage, slab):
    SLAB: gl.constexpr = x_box.block_type.shape[1]
    tma.async_copy_global_to_shared(x_box, [0, slab * SLAB], ready.index(stage), xs.index(stage))


@gluon.jit
def _fetch(
    x_box, weight_box, xs, weights, ready, free,
    SLABS: gl.constexpr, STAGES: gl.constexpr, OUTS: gl.constexpr, PART: gl.constexpr,
    HALVES: gl.constexpr,
):  # fmt: skip
    """What the fetching warp does."""
    column = gl.program_id(0) * PART
    begin = gl.program_id(1) * SLABS
    BYTES: gl.constexpr = (x_box.block_type.shape[0] + 64) * 128
    for early in gl.static_range(STAGES):
        _fetch_weights(
            weight_box, weights, ready, early, begin + early, column, OUTS, PART, HALVES, BYTES
        )
    tl.extra.cuda.gdc_wait()
    for early in gl.static_range(STAGES):
        _fetch_x(x_box, xs, ready, early, begin + early)
    for slab in range(STAGES, SLABS):
        stage = slab % STAGES
        mbarrier.wait(free.index(stage), (slab // STAGES - 1) & 1)
        _fetch_weights(
            weight_box, weights, ready, stage, begin + slab, column, OUTS, PART, HALVES, BYTES
        )
        _fetch_x(x_box, xs, ready, stage, begin + slab)


@gluon.jit
def _multiply(
    xs, weights, ready, free, scales, x_scales, bias, out, rows,
    SLABS: gl.constexpr, STAGES: gl.constexpr, OUTS: gl.constexpr, PART: gl.constexpr,
    HALVES: gl.constexpr, ROWS: gl.constexpr, BIAS: gl.constexpr, GELU: gl.constexpr,
    SCALED: gl.constexpr,
):  # fmt: skip
    """What the other warps do: the product of the program's tiles."""
    DEEP: gl.constexpr = 32 if SCALED else 16
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, DEEP])
    if SCALED:
        near = gl.arange(0, 64, gl.SliceLayout(1, mma))
        line = gl.program_id(0) * PART + near % PART + near // PART * OUTS
        scale = gl.load(scales + line)
        tl.extra.cuda.gdc_wait()
        row = gl.arange(0, ROWS, gl.SliceLayout(0, mma))
        x_scale = gl.load(x_scales + row, mask=row < rows, other=0.0)
        total = exact_sum_of_slabs(xs, weights, ready, free, mma, SLABS, STAGES, ROWS)
        total *= scale[:, None] * x_scale[None, :]
    else:
        total = sum_of_slabs(xs, weights, ready, free, mma, SLABS, STAGES, ROWS)
    write_columns(total, gl.program_id(0), bias, out, rows, OUTS, PART, HALVES, ROWS, BIAS, GELU)


# One compiled kernel serves every call: nothing depends on this integer's value.
@gluon.jit(do_not_specialize=["rows"])
def _rows_kernel(
    x_box, weight_box, scales, x_scales, bias, out, rows,
    WIDTH: gl.constexpr, OUTS: gl.constexpr, ROWS: gl.constexpr, PART: gl.constexpr,
    SPLITS: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr, BIAS: gl.constexpr,
    GELU: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """``PART`` columns of up to ``ROWS`` rows of ``out`` a program, over a part of the width."""
    tl.extra.cuda.gdc_launch_dependents()
    SLAB: gl.constexpr = 128 if SCALED else 64
    SLABS: gl.constexpr = WIDTH // SLAB // SPLITS
    dtype: gl.constexpr = x_box.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 1024 // SLAB, 2)
    xs = gl.allocate_shared_memory(dtype, [STAGES, ROWS, SLAB], shared)
    weights = gl.allocate_shared_memory(dtype, [STAGES, 64, SLAB], shared)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for early in gl.static_range(STAGES):
        mbarrier.init(ready.index(early), count=1)
        mbarrier.init(free.index(early), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (xs, weights, ready, free, scales, x_scales, bias, out, rows,
                         SLABS, STAGES, OUTS, PART, HALVES, ROWS, BIAS, GELU, SCALED)),
            (_fetch, (x_box, weight_box, xs, weights, ready, free,
                      SLABS, STAGES, OUTS, PART, HALVES)),
        ],
        [1],
        [24],
    )  # fmt: skip


def why_not(dtype: torch.dtype, width: int, outs: int) -> str:
    """Why the kernel cannot compute a layer of [outs, width]; empty if it can."""
    if dtype not in (*DTYPES, FP8):
        return f"takes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    slab = _slab(dtype)
    if width % slab or outs % 64:
        return f"takes multiples of {slab} columns and 64 rows of W, not {outs} x {width}"
    return ""


def _slab(dtype: torch.dtype) -> int:
    """Columns of the width in a tile."""
    return _SLAB_BYTES // dtype.itemsize


def splits_for(width: int, outs: int, gated: bool = False, item_bytes: int = 2) -> int:
    """How many programs share the width of a layer that may be divided."""
    slabs, programs = width * item_bytes // _SLAB_BYTES, outs // (32 if gated else 64)
    return next(
        (
            count for count in range(1, slabs)
            if slabs % count == 0 and programs * count >= _LEAST_PROGRAMS
            and slabs // count <= _MOST_SLABS
        ),
        1,
    )  # fmt: skip


def shape_for(
    width: int, outs: int, tile: int, gated: bool, divided: bool, item_bytes: int = 2
) -> Shape:
    """How a product of up to ``tile`` rows is cut; ``divided``: whether programs may share the
    width.

    Not searched for each layer: in whole steps of Qwen3-0.6B and Qwen3-8B at 8 to 128 rows, on an
    H200, no other number of parts or stages of one product took more than 0.5 % off the step
    (2026-11-22).
    """
    slabs = width * item_bytes // _SLAB_BYTES
    splits = splits_for(width, outs, gated, item_bytes) if divided else 1
    room = _SHARED_BYTES - 1024 - min(64 * tile * 4, 16 * 1024)
    most = _GATED_STAGES if gated and tile <= 32 else _MOST_STAGES
    return Shape(splits, min(slabs // splits, most, room // ((tile + 64) * 128)))


def _layout(item_bytes: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(_SLAB_BYTES, 8 * item_bytes, 2)


def tiles_for(bounds: tuple[int, int]) -> tuple[int, ...]:
    """The tiles of rows that calls for so many rows, from and to, need."""
    first, last = (next(at for at, tile in enumerate(TILES) if tile >= rows) for rows in bounds)
    return TILES[first : last + 1]


class RowsConstants(NamedTuple):
    """The kernel's constants, in its order."""

    width: int
    outs: int
    rows: int
    part: int
    """Columns of out of a program."""
    splits: int
    stages: int
    halves: int
    """2: gate and up."""
    bias: bool
    gelu: bool
    """SiLU otherwise, where there are halves."""
    scaled: bool
    """Both operands are FP8."""


class _Ready(NamedTuple):
    """What is launched for up to ``tile`` rows."""

    tile: int
    splits: int
    box: TensorDescriptor
    """x."""
    launch: Callable[..., None]
    constants: RowsConstants


class HopperLinear:
    """One linear layer of each of a decoder's layers, compiled, for weights and a buffer of x whose
    addresses never change.

    Descriptors are made once, and a launch goes past Triton's look-up of the compiled kernel. A
    descriptor is copied into every launch, and so into the graphs that record it.
    """

    def __init__(
        self,
        x: Tensor,
        weights: list[Tensor],
        biases: list[Tensor | None],
        bounds: tuple[int, int],
        *,
        gated: bool = False,
        activation: str = "silu",
        divided: bool = False,
        scales: list[Tensor] | None = None,
        x_scales: Tensor | None = None,
        shapes: Mapping[int, Shape] | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        """x: [T, K]; weights: [N, K] each, or [2 N, K] if ``gated``; activation: of the gate, silu
        or gelu_tanh; biases: as many numbers as a
        weight has rows; all contiguous. bounds: numbers of rows that calls are for, from and to.
        divided: whether a call may give parts of the sum. scales, x_scales: of FP8, fp32, as many
        numbers as a weight has rows, and [T]. shapes: by tiles, others than ``shape_for``'s;
        out_dtype: where it is not x's.

        Raises what Triton raises where it cannot compile or load the kernels.
        """
        width = x.shape[1]
        self._outs = weights[0].shape[0] // (2 if gated else 1)
        self._halves = 2 if gated else 1
        self._part = 64 // self._halves
        self._gelu = gated and activation == "gelu_tanh"
        self._biases = biases
        plain: list[Tensor | None] = [None] * len(weights)
        self._scales, self._x_scales = scales or plain, x_scales
        self._out_dtype = out_dtype or x.dtype
        size = x.element_size()
        box = [self._part, _slab(x.dtype)]
        self._boxes = [
            TensorDescriptor.from_tensor(weight, box, _layout(size)) for weight in weights
        ]
        shapes = shapes or {
            tile: shape_for(width, self._outs, tile, gated, divided, size)
            for tile in tiles_for(bounds)
        }
        most_parts = max(shape.splits for shape in shapes.values())
        self._parts = None
        if most_parts > 1:
            count = most_parts * bounds[1] * self._outs
            self._parts = torch.empty(count, dtype=torch.float32, device=x.device)
        self._ready = side_by_side(lambda tile: self._prepare(x, tile, shapes[tile]), shapes)

    def _prepare(self, x: Tensor, tile: int, shape: Shape) -> _Ready:
        box = TensorDescriptor.from_tensor(x, [tile, _slab(x.dtype)], _layout(x.element_size()))
        bias, scaled = self._biases[0], self._x_scales is not None
        constants = RowsConstants(
            width=x.shape[1],
            outs=self._outs,
            rows=tile,
            part=self._part,
            splits=shape.splits,
            stages=shape.stages,
            halves=self._halves,
            bias=bias is not None,
            gelu=self._gelu,
            scaled=scaled,
        )
        wide = torch.float32 if scaled else None
        kernel = _rows_kernel.warmup(
            box, self._boxes[0], wide, wide, None if bias is None else bias.dtype,
            torch.float32 if shape.splits > 1 else self._out_dtype, 1, *constants,
            grid=(1,), num_warps=4, maxnreg=_REGISTERS[tile], launch_pdl=True,
        )  # fmt: skip
        launch = kernel[self._outs // self._part, shape.splits, 1]  # loads it, too
        return _Ready(tile, shape.splits, box, launch, constants)

    def __call__(self, layer: int, rows: int, out: Tensor) -> Tensor:
        """The first ``rows`` rows of x times the weight of ``layer``.

        out: [rows, N] of x's type, contiguous. Returns it, or [P, rows, N] in fp32, parts whose sum
        it would be, overwritten by the next call.
        """
        ready = next(one for one in self._ready if rows <= one.tile)
        if ready.splits > 1:
            out = self.parts(rows)
        ready.launch(
            ready.box, self._boxes[layer], self._scales[layer], self._x_scales, self._biases[layer],
            out, rows, *ready.constants,
        )  # fmt: skip
        return out

    def parts(self, rows: int) -> Tensor:
        """What a call for so many rows returns where it gives parts."""
        if self._parts is None:
            raise ValueError("no call gives parts")
        splits = next(one.splits for one in self._ready if rows <= one.tile)
        count = splits * rows * self._outs
        return self._parts[:count].view(splits, rows, self._outs)
