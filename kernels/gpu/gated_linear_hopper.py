"""activation(x W_gateᵀ) * (x W_upᵀ) of many rows on Hopper's matrix unit, in one kernel.

The library's product is as fast, but writes 2 I values a row that the gate's kernel reads again.
Here a program computes 128 rows of 128 columns of both halves and writes I values a row. As many
programs as multiprocessors take tiles in turn: a warp brings tiles of x and W by the tensor memory
accelerator, ahead into the program's next tile; two groups of four warps multiply 64 rows each, and
write through shared memory. References: ``penstock.kernels.linear`` and ``activation``.

Written in Gluon, Triton's language of explicit layouts, which is experimental: with a Triton that
lacks it or has changed it, importing this module or making a ``HopperGatedLinear`` fails. Compute
capability 9.0 alone. The interpreter cannot run it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
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

from penstock.kernels.gpu.device_facts import multiprocessors
from penstock.kernels.gpu.device_functions_hopper import activated

DTYPES = (torch.bfloat16, torch.float16)
_ROWS, _COLUMNS, _SLAB = 128, 128, 64
"""A tile of out, and columns of x and W that are multiplied at once; the kernel is written for
these sizes."""
_STAGES = 4
_BAND = 16
"""Tiles of rows that are computed with each tile of W before the next one's turn, so that what the
programs read at a time is found in the L2 cache. 4, 8, 32 and 64 are no faster."""
_LEAST_BUSY, _LEAST_ROWS = 0.9, 512
"""Share of the programs' turns that must be filled, padding not counted, and rows. With 0.96 and
more of them the kernel takes 4 to 18 % less time than the library's product and the gate's kernel
(H200, x of 1,024 and 4,096 columns, 512 to 8,192 rows), with 0.87 6 % more, with 0.73 9 to 17."""
# Of 64 Ki registers: 384 threads begin with 168 each; the groups then take from the fetching warp.
_REGISTERS = 168
_GROUP_REGISTERS = 240
_FETCH_REGISTERS = 24


@gluon.jit
def _tile_at(turn, row_tiles, COLUMN_TILES: gl.constexpr, BAND: gl.constexpr):
    """Tile of rows and of columns that the program computes in a turn."""
    at = turn * gl.num_programs(0) + gl.program_id(0)
    band = at // (BAND * COLUMN_TILES)
    inside = at % (BAND * COLUMN_TILES)
    height = gl.minimum(row_tiles - band * BAND, BAND)
    return band * BAND + inside % height, inside // height


@gluon.jit
def _turns(row_tiles, COLUMN_TILES: gl.constexpr):
    """Tiles that the program computes."""
    left = row_tiles * COLUMN_TILES - gl.program_id(0)
    return gl.cdiv(gl.maximum(left, 0), gl.num_programs(0))


@gluon.jit
def _fetch(
    x_box, weight_box, xs, weights, ready, free, row_tiles,
    SLABS: gl.constexpr, STAGES: gl.constexpr, COLUMN_TILES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """What the fetching warp does."""
    done = row_tiles * 0
    for turn in range(_turns(row_tiles, COLUMN_TILES)):
        row_tile, column_tile = _tile_at(turn, row_tiles, COLUMN_TILES, BAND)
        for slab in range(SLABS):
            stage = done % STAGES
            mbarrier.wait(free.index(stage), ((done // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(stage), (128 + 256) * 64 * 2)
            tma.async_copy_global_to_shared(
                x_box, [row_tile * 128, slab * 64], ready.index(stage), xs.index(stage)
            )
            for half in gl.static_range(2):
                line = (half * COLUMN_TILES + column_tile) * 128
                target = weights.index(stage).slice(half * 128, 128)
                tma.async_copy_global_to_shared(
                    weight_box, [line, slab * 64], ready.index(stage), target
                )
            done += 1


@gluon.jit
def _multiply(
    out_box, xs, weights, outs, ready, free, row_tiles,
    SLABS: gl.constexpr, STAGES: gl.constexpr, COLUMN_TILES: gl.constexpr, BAND: gl.constexpr,
    GELU: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """What a group of four warps does: 64 rows of each tile."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    dtype: gl.constexpr = xs.dtype
    done = row_tiles * 0
    for turn in range(_turns(row_tiles, COLUMN_TILES)):
        row_tile, column_tile = _tile_at(turn, row_tiles, COLUMN_TILES, BAND)
        total = gl.zeros([64, 256], gl.float32, mma)
        for slab in range(SLABS):
            stage = done % STAGES
            mbarrier.wait(ready.index(stage), (done // STAGES) & 1)
            total = warpgroup_mma(
                xs.index(stage).slice(GROUP * 64, 64), weights.index(stage).permute((1, 0)), total,
                use_acc=slab > 0, is_async=True,
            )  # fmt: skip
            total = warpgroup_mma_wait(1, deps=(total,))
            if slab > 0:
                mbarrier.arrive(free.index((done - 1) % STAGES))
            done += 1
        total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(free.index((done - 1) % STAGES))
        # The halves of the columns lie in the same threads.
        gate, up = total.reshape([64, 2, 128]).permute((0, 2, 1)).split()
        gate = gl.convert_layout(gate, half)
        up = gl.convert_layout(up, half)
        result = activated(gate, up, GELU)
        tma.store_wait(0)
        outs.index(GROUP).store(result.to(dtype))
        fence_async_shared()
        place = [row_tile * 128 + GROUP * 64, column_tile * 128]
        tma.async_copy_shared_to_global(out_box, place, outs.index(GROUP))
    tma.store_wait(0)


# One compiled kernel serves every number of rows.
@gluon.jit(do_not_specialize=["row_tiles"])
def _gated_kernel(
    x_box, weight_box, out_box, row_tiles,
    SLABS: gl.constexpr, COLUMN_TILES: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
    GELU: gl.constexpr, GROUP_REGISTERS: gl.constexpr, FETCH_REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x_box.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    xs = gl.allocate_shared_memory(dtype, [STAGES, 128, 64], shared)
    weights = gl.allocate_shared_memory(dtype, [STAGES, 256, 64], shared)
    outs = gl.allocate_shared_memory(dtype, [2, 64, 128], shared)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (out_box, xs, weights, outs, ready, free, row_tiles,
                         SLABS, STAGES, COLUMN_TILES, BAND, GELU, 0)),
            (_multiply, (out_box, xs, weights, outs, ready, free, row_tiles,
                         SLABS, STAGES, COLUMN_TILES, BAND, GELU, 1)),
            (_fetch, (x_box, weight_box, xs, weights, ready, free, row_tiles,
                      SLABS, STAGES, COLUMN_TILES, BAND)),
        ],
        [4, 1],
        [GROUP_REGISTERS, FETCH_REGISTERS],
    )  # fmt: skip


def why_not(dtype: torch.dtype, width: int, outs: int) -> str:
    """Why the kernel cannot compute a layer of W [2 outs, width]; empty if it can."""
    if dtype not in DTYPES:
        return f"takes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if width % _SLAB or outs % _COLUMNS:
        return f"takes multiples of {_SLAB} columns and {_COLUMNS} rows of W, not {outs} x {width}"
    return ""


def pays(rows: int, outs: int, multiprocessors: int) -> bool:
    """Whether so many rows are faster with the kernel than with the library."""
    columns = outs // _COLUMNS
    turns = -(-rows // _ROWS) * columns
    turns += -turns % multiprocessors
    return rows >= _LEAST_ROWS and rows / _ROWS * columns >= _LEAST_BUSY * turns


class GatedConstants(NamedTuple):
    """The kernel's constants, in its order."""

    slabs: int
    """Steps of the width."""
    column_tiles: int
    stages: int
    band: int
    gelu: bool
    """SiLU otherwise."""
    group_registers: int
    fetch_registers: int


class HopperGatedLinear:
    """The gated product of each of a decoder's layers, compiled, for weights and buffers whose
    addresses never change.

    Descriptors are made once, and a launch goes past Triton's look-up of the compiled kernel. A
    descriptor is copied into every launch, and so into the graphs that record it.
    """

    def __init__(
        self, x: Tensor, weights: list[Tensor], out: Tensor, activation: str = "silu"
    ) -> None:
        """x: [T, K]; weights: [2 I, K] each, gate first; out: [T, I]; all contiguous, and of a
        type and sizes that ``why_not`` has nothing against. activation: silu or gelu_tanh.

        Raises what Triton raises where it cannot compile or load the kernel.
        """
        layout = gl.NVMMASharedLayout(_SLAB * 2, 16, 2)
        self._x_box = TensorDescriptor.from_tensor(x, [_ROWS, _SLAB], layout)
        self._out_box = TensorDescriptor.from_tensor(out, [64, _COLUMNS], layout)
        self._boxes = [
            TensorDescriptor.from_tensor(weight, [_COLUMNS, _SLAB], layout) for weight in weights
        ]
        self._outs = out.shape[1]
        self._constants = GatedConstants(
            slabs=x.shape[1] // _SLAB,
            column_tiles=self._outs // _COLUMNS,
            stages=_STAGES,
            band=_BAND,
            gelu=activation == "gelu_tanh",
            group_registers=_GROUP_REGISTERS,
            fetch_registers=_FETCH_REGISTERS,
        )
        self._kernel = _gated_kernel.warmup(
            self._x_box, self._boxes[0], self._out_box, 1, *self._constants,
            grid=(1,), num_warps=4, maxnreg=_REGISTERS,
        )  # fmt: skip
        self._kernel[1, 1, 1]  # loads it
        self._multiprocessors = multiprocessors()

    def pays(self, rows: int) -> bool:
        """Whether so many rows are faster with it than with the library."""
        return pays(rows, self._outs, self._multiprocessors)

    def __call__(self, layer: int, rows: int) -> None:
        """Write the first ``rows`` rows of out; those behind them up to a multiple of 128 are read
        and written, too."""
        row_tiles = -(-rows // _ROWS)
        programs = min(self._multiprocessors, row_tiles * (self._outs // _COLUMNS))
        self._kernel[programs, 1, 1](
            self._x_box, self._boxes[layer], self._out_box, row_tiles, *self._constants
        )
