"""Linear layers of decode steps on Hopper from weights that are compressed to 12 bits a number.

The layers and results of ``rows_linear_hopper``, to the bit where as many programs share the width.
Tiles of W come as ``compressed_weights`` has left them, three quarters of the bytes, and are made
bf16 again in the registers that the matrix unit takes its first operand from: eleven instructions
for eight numbers, for which a program has time while it waits for the next tiles. It has one group
of four warps, or three with a block of W each and the same rows of x. ``stages`` steps of ``subs``
tiles of each block are under way. References: ``compressed_weights.restore``, and
``rows_linear_hopper``'s.

Written in Gluon, Triton's language of explicit layouts, which is experimental: with a Triton that
lacks it or has changed it, importing this module or making a ``CompressedLinear`` fails. Compute
capability 9.0 alone. The interpreter cannot run it.
"""

from __future__ import annotations

from collections.abc import Callable
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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from penstock.kernels.gpu import compressed_weights
from penstock.kernels.gpu.compressed_tiles_hopper import entry_at, restore_tile
from penstock.kernels.gpu.compressed_weights import TILE, CompressedWeight
from penstock.kernels.gpu.rows_linear_hopper import tiles_for
from penstock.kernels.gpu.rows_tiles_hopper import write_columns
from penstock.kernels.gpu.side_by_side import side_by_side

CAPACITY = gl.constexpr(compressed_weights.CAPACITY)
END = gl.constexpr(compressed_weights.END)
_SHARED_BYTES = 227 * 1024
_MOST_STAGES, _LEAST_PROGRAMS = 4, 100
# 256 or 512 threads begin with 128 registers each; the groups take from the fetching warps.
_REGISTERS = 128


@gluon.jit
def _fetch_weights(
    low_box, high_box, lows, highs, ready, stage, tile, stride,
    GROUPS: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Start to bring a step's tiles of W; blocks lie ``stride`` tiles apart. ``BYTES``: of those of
    x, too."""
    mbarrier.expect(ready.index(stage), BYTES)
    for group in gl.static_range(GROUPS):
        first = tile + group * stride
        tma.async_copy_global_to_shared(
            low_box, [first * 32, 0], ready.index(stage),
            lows.index(stage * GROUPS + group),
        )  # fmt: skip
        tma.async_copy_global_to_shared(
            high_box, [first * 16, 0], ready.index(stage),
            highs.index(stage * GROUPS + group),
        )  # fmt: skip


@gluon.jit
def _fetch_x(x_box, xs, ready, stage, tile, SUBS: gl.constexpr, ROWS: gl.constexpr):
    tma.async_copy_global_to_shared(
        x_box, [tile, 0, 0], ready.index(stage), xs.index(stage).reshape([SUBS, ROWS, 64])
    )


@gluon.jit
def _fetch(
    x_box, low_box, high_box, xs, lows, highs, ready, free,
    STEPS: gl.constexpr, STAGES: gl.constexpr, SUBS: gl.constexpr, GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """What the fetching warp does."""
    begin = gl.program_id(1) * STEPS * SUBS
    stride = gl.num_programs(1) * STEPS * SUBS
    tile = gl.program_id(0) * GROUPS * stride + begin
    BYTES: gl.constexpr = SUBS * (ROWS + GROUPS * 48) * 128
    for early in gl.static_range(STAGES):
        _fetch_weights(
            low_box, high_box, lows, highs, ready, early, tile + early * SUBS, stride,
            GROUPS, BYTES,
        )  # fmt: skip
    tl.extra.cuda.gdc_wait()
    for early in gl.static_range(STAGES):
        _fetch_x(x_box, xs, ready, early, begin + early * SUBS, SUBS, ROWS)
    for step in range(STAGES, STEPS):
        stage = step % STAGES
        mbarrier.wait(free.index(stage), (step // STAGES - 1) & 1)
        _fetch_weights(
            low_box, high_box, lows, highs, ready, stage, tile + step * SUBS, stride,
            GROUPS, BYTES,
        )  # fmt: skip
        _fetch_x(x_box, xs, ready, stage, begin + step * SUBS, SUBS, ROWS)


@gluon.jit
def _multiply(
    xs, lows, highs, ready, free, lists, scales, exceptions, most, bias, out, rows,
    STEPS: gl.constexpr, STAGES: gl.constexpr, SUBS: gl.constexpr, OUTS: gl.constexpr,
    PART: gl.constexpr, HALVES: gl.constexpr, ROWS: gl.constexpr, BIAS: gl.constexpr,
    GELU: gl.constexpr, GROUPS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """What a group of four warps does: the product of a block's tiles, in transposed form."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    plain: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    block = gl.program_id(0) * GROUPS + GROUP
    scale = gl.load(scales + block * 64 + gl.arange(0, 64, gl.SliceLayout(1, mma)))
    # All at once: memory answers late while it streams weights.
    exceptions += (block * gl.num_programs(1) + gl.program_id(1)) * most
    place = gl.arange(0, CAPACITY, plain)
    listed = lists.index(GROUP)
    listed.store(gl.load(exceptions + place, mask=place < most, other=END))
    listed = listed._reinterpret(gl.int64, [CAPACITY, 1], flat)
    index = block * 0
    entry = entry_at(listed, index)
    total = gl.zeros([64, ROWS], gl.float32, mma)
    for step in range(STEPS):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        for sub in gl.static_range(SUBS):
            tile, index, entry = restore_tile(
                lows.index(stage * GROUPS + GROUP).slice(sub * 32, 32),
                highs.index(stage * GROUPS + GROUP).slice(sub * 16, 16),
                left, listed, index, entry, step * SUBS + sub,
            )  # fmt: skip
            right = xs.index(stage).slice(sub * ROWS, ROWS).permute((1, 0))
            total = warpgroup_mma(tile, right, total, is_async=True)
        total = warpgroup_mma_wait(0, deps=(total,))
        if step + STAGES < STEPS:
            mbarrier.arrive(free.index(stage))
    total *= scale[:, None]
    write_columns(total, block, bias, out, rows, OUTS, PART, HALVES, ROWS, BIAS, GELU)


# One compiled kernel serves every call: nothing depends on these integers' values.
@gluon.jit(do_not_specialize=["most", "rows"])
def _compressed_kernel(
    x_box, low_box, high_box, scales, exceptions, most, bias, out, rows,
    WIDTH: gl.constexpr, OUTS: gl.constexpr, ROWS: gl.constexpr, PART: gl.constexpr,
    SPLITS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, SUBS: gl.constexpr,
    HALVES: gl.constexpr, BIAS: gl.constexpr, GELU: gl.constexpr,
):  # fmt: skip
    """A program: ``PART`` columns of up to ``ROWS`` rows of ``out`` for each group, over a part of
    the width."""
    tl.extra.cuda.gdc_launch_dependents()
    STEPS: gl.constexpr = WIDTH // 64 // SPLITS // SUBS
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    words: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, SUBS * ROWS, 64], shared)
    lows = gl.allocate_shared_memory(gl.int32, [STAGES * GROUPS, SUBS * 32, 32], words)
    highs = gl.allocate_shared_memory(gl.int32, [STAGES * GROUPS, SUBS * 16, 32], words)
    lists = gl.allocate_shared_memory(gl.int64, [GROUPS, CAPACITY], flat)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for early in gl.static_range(STAGES):
        mbarrier.init(ready.index(early), count=1)
        mbarrier.init(free.index(early), count=GROUPS)
    fence_async_shared()
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (xs, lows, highs, ready, free, lists, scales, exceptions, most, bias,
                             out, rows, STEPS, STAGES, SUBS, OUTS, PART, HALVES, ROWS, BIAS,
                             GELU, GROUPS, 0)),
                (_fetch, (x_box, low_box, high_box, xs, lows, highs, ready, free,
                          STEPS, STAGES, SUBS, GROUPS, ROWS)),
            ],
            [1],
            [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (xs, lows, highs, ready, free, lists, scales, exceptions, most, bias,
                             out, rows, STEPS, STAGES, SUBS, OUTS, PART, HALVES, ROWS, BIAS,
                             GELU, GROUPS, 0)),
                (_multiply, (xs, lows, highs, ready, free, lists, scales, exceptions, most, bias,
                             out, rows, STEPS, STAGES, SUBS, OUTS, PART, HALVES, ROWS, BIAS,
                             GELU, GROUPS, 1)),
                (_multiply, (xs, lows, highs, ready, free, lists, scales, exceptions, most, bias,
                             out, rows, STEPS, STAGES, SUBS, OUTS, PART, HALVES, ROWS, BIAS,
                             GELU, GROUPS, 2)),
                (_fetch, (x_box, low_box, high_box, xs, lows, highs, ready, free,
                          STEPS, STAGES, SUBS, GROUPS, ROWS)),
            ],
            [4, 4, 1],
            [152, 152, 24],
        )  # fmt: skip


def why_not(rows: int, width: int, splits: int, *, gated: bool = False) -> str:
    """Why the kernel cannot compute a layer of W [rows, width]; empty if it can."""
    tile = TILE
    if width % (2 * splits * tile) or rows % tile or (gated and rows % (2 * tile)):
        return f"{rows} x {width} numbers; multiples of {tile} x {2 * splits * tile} are taken"
    return ""


class Shape(NamedTuple):
    groups: int
    """Blocks of 64 rows of W that a program multiplies side by side, with the same rows of x."""
    stages: int
    """Steps under way."""
    subs: int
    """Tiles of each block in a step."""


def shape_for(width: int, blocks: int, splits: int, tile: int) -> Shape:
    """How a product of up to ``tile`` rows with W of so many blocks is computed.

    Three groups are taken where that leaves a program for nearly every multiprocessor: x comes a
    third as often from the L2 cache, which limits products of some dozens of rows, and no program
    begins late. For gate and up of Qwen3-8B that took 10 % off at one row and 15 % at 64; no other
    number of stages or tiles gave 1 % more at 1, 16, 32 or 64 rows (H200, 2026-11-23).
    """
    groups = 3 if blocks % 3 == 0 and blocks // 3 * splits >= _LEAST_PROGRAMS else 1
    slabs = width // TILE // splits
    subs = 4 if slabs % 4 == 0 and groups == 1 else 2
    # Lists of exceptions, barriers, and what rows of out are transposed in.
    transposed = min(64 * tile * 4, 16 * 1024)
    room = _SHARED_BYTES - 1024 - groups * (8 * compressed_weights.CAPACITY + transposed)
    stages = room // (subs * (48 * groups + tile) * 128)
    return Shape(groups, min(_MOST_STAGES, slabs // subs, stages), subs)


class CompressedConstants(NamedTuple):
    """The kernel's constants, in its order."""

    width: int
    outs: int
    rows: int
    part: int
    """Columns of out of a group."""
    splits: int
    groups: int
    stages: int
    subs: int
    halves: int
    """2: gate and up."""
    bias: bool
    gelu: bool
    """SiLU otherwise, where there are halves."""


class _Ready(NamedTuple):
    """What is launched for up to ``tile`` rows."""

    tile: int
    x: TensorDescriptor
    weights: list[tuple[TensorDescriptor, TensorDescriptor]]
    """Low and high of each layer."""
    launch: Callable[..., None]
    constants: CompressedConstants


class CompressedLinear:
    """One linear layer of each of a decoder's layers, compiled, for weights and a buffer of x whose
    addresses never change; called as a ``HopperLinear``."""

    def __init__(
        self,
        x: Tensor,
        weights: list[CompressedWeight],
        biases: list[Tensor | None],
        bounds: tuple[int, int],
        *,
        gated: bool = False,
        activation: str = "silu",
    ) -> None:
        """x: [T, K] bf16, contiguous; weights: compressed with the same ``gated``, in as many parts
        each; biases: as many numbers as a weight has rows. bounds: numbers of rows that calls are
        for, from and to; activation: of the gate, silu or gelu_tanh.

        Raises what Triton raises where it cannot compile or load the kernels.
        """
        self._gelu = gated and activation == "gelu_tanh"
        self._weights, self._biases = weights, biases
        self._halves = 2 if gated else 1
        self._outs = len(weights[0].scales) // self._halves
        splits = len(weights[0].exceptions) // (len(weights[0].scales) // TILE)
        self._splits = splits
        self._parts = None
        if splits > 1:
            count = splits * bounds[1] * self._outs
            self._parts = torch.empty(count, dtype=torch.float32, device=x.device)
        self._ready = side_by_side(lambda tile: self._prepare(x, tile), tiles_for(bounds))

    def _prepare(self, x: Tensor, tile: int) -> _Ready:
        (rows, width), part = x.shape, 64 // self._halves
        blocks = self._outs // part
        shape = shape_for(width, blocks, self._splits, tile)
        box = TensorDescriptor(
            x, [width // 64, rows, 64], [64, width, 1], [shape.subs, tile, 64],
            gl.NVMMASharedLayout(128, 16, 3),
        )  # fmt: skip
        words = gl.NVMMASharedLayout(128, 32, 2)
        boxes = [
            (
                TensorDescriptor.from_tensor(weight.low, [shape.subs * 32, 32], words),
                TensorDescriptor.from_tensor(weight.high, [shape.subs * 16, 32], words),
            )
            for weight in self._weights
        ]
        bias = self._biases[0]
        constants = CompressedConstants(
            width=width,
            outs=self._outs,
            rows=tile,
            part=part,
            splits=self._splits,
            groups=shape.groups,
            stages=shape.stages,
            subs=shape.subs,
            halves=self._halves,
            bias=bias is not None,
            gelu=self._gelu,
        )
        kernel = _compressed_kernel.warmup(
            box, *boxes[0], torch.float32, torch.int64, 1, None if bias is None else bias.dtype,
            torch.float32 if self._splits > 1 else x.dtype, 1, *constants,
            grid=(1,), num_warps=4, maxnreg=_REGISTERS, launch_pdl=True,
        )  # fmt: skip
        launch = kernel[blocks // shape.groups, self._splits, 1]  # loads it, too
        return _Ready(tile, box, boxes, launch, constants)

    def __call__(self, layer: int, rows: int, out: Tensor) -> Tensor:
        """As ``HopperLinear.__call__``."""
        ready = next(one for one in self._ready if rows <= one.tile)
        if self._parts is not None:
            count = self._splits * rows * self._outs
            out = self._parts[:count].view(self._splits, rows, self._outs)
        weight = self._weights[layer]
        ready.launch(
            ready.x, *ready.weights[layer], weight.scales, weight.exceptions,
            weight.exceptions.shape[1], self._biases[layer], out, rows, *ready.constants,
        )  # fmt: skip
        return out
