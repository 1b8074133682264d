"""Device functions of products of few rows on Hopper: sums over tiles in shared memory, and what
writes them out. Used by ``rows_linear_hopper`` and ``compressed_linear_hopper``."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from penstock.kernels.gpu.device_functions_hopper import activated


@gluon.jit
def write_columns(
    total, block, bias, out, rows,
    OUTS: gl.constexpr, PART: gl.constexpr, HALVES: gl.constexpr, ROWS: gl.constexpr,
    BIAS: gl.constexpr, GELU: gl.constexpr,
):  # fmt: skip
    """Write the columns of out of a block of 64 rows of W from ``total`` [64, ROWS], the sum over
    the part of the width that the program's second number names. ``HALVES`` == 2: the first 32 rows
    are gate, the others up."""
    LANES: gl.constexpr = PART // 8
    plain: gl.constexpr = gl.BlockedLayout([8, 1], [LANES, 32 // LANES], [1, 4], [0, 1])
    if HALVES == 2:
        both: gl.constexpr = gl.BlockedLayout(
            [8, 1, 2], [LANES, 32 // LANES, 1], [1, 4, 1], [2, 0, 1]
        )
        pair = total.reshape([2, PART, ROWS]).permute((1, 2, 0))
        result, up = gl.convert_layout(pair, both).split()
        result = gl.convert_layout(result, plain)
        up = gl.convert_layout(up, plain)
    else:
        result = gl.convert_layout(total, plain)
    split = gl.program_id(1)
    place = block * PART + gl.arange(0, PART, gl.SliceLayout(1, plain))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, plain))
    if BIAS:  # noqa: SIM102
        if split == 0:
            result += gl.load(bias + place).to(gl.float32)[:, None]
            if HALVES == 2:
                up += gl.load(bias + OUTS + place).to(gl.float32)[:, None]
    if HALVES == 2:
        result = activated(result, up, GELU)
    line = split * rows + row
    target = out + line.to(gl.int64)[None, :] * OUTS + place[:, None]
    gl.store(target, result.to(out.dtype.element_ty), mask=(row < rows)[None, :])


@gluon.jit
def sum_of_slabs(
    xs, weights, ready, free, mma: gl.constexpr,
    SLABS: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """The product of the program's tiles, in transposed form: [64, ROWS]."""
    total = gl.zeros([64, ROWS], gl.float32, mma)
    for slab in range(SLABS):
        stage = slab % STAGES
        mbarrier.wait(ready.index(stage), (slab // STAGES) & 1)
        right = xs.index(stage).permute((1, 0))
        total = warpgroup_mma(weights.index(stage), right, total, is_async=True)
        total = warpgroup_mma_wait(1, deps=(total,))
        if (slab > 0) & (slab - 1 + STAGES < SLABS):
            mbarrier.arrive(free.index((slab - 1) % STAGES))
    return warpgroup_mma_wait(0, deps=(total,))


@gluon.jit
def exact_sum_of_slabs(
    xs, weights, ready, free, mma: gl.constexpr,
    SLABS: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """As ``sum_of_slabs``, of FP8: the matrix unit adds its products in about 14 bits, so that
    sums of a slab are added up here."""
    total = gl.zeros([64, ROWS], gl.float32, mma)
    nothing = gl.zeros([64, ROWS], gl.float32, mma)
    for slab in range(SLABS):
        stage = slab % STAGES
        mbarrier.wait(ready.index(stage), (slab // STAGES) & 1)
        right = xs.index(stage).permute((1, 0))
        part = warpgroup_mma(weights.index(stage), right, nothing, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=(part,))
        if slab + STAGES < SLABS:
            mbarrier.arrive(free.index(stage))
        total += part
    return total
