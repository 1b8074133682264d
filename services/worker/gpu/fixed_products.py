"""Products of ``--deterministic``: by the library where it gives the bits of our kernel.

The library's kernels add up a row's products in the order of ``fixed_linear`` unless they divide
the sum among programs, which it can be asked not to do. Which kernel it takes follows from the
number of rows. So it is tried at a few numbers of rows, with the model's own weights, and steps are
filled up to one of those where all bits were the same; what else its rows hold does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.kernels.gpu.fixed_linear import FEW_ROWS, Shape, fixed_linear

_SIZES = (128, 192, *range(256, 2049, 128))
"""Numbers of rows that are tried: with fewer some products take ten times as long undivided."""
_COMPARED = 64
"""Rows that are compared at once."""
_LEAST_ROWS = FEW_ROWS + 1
"""Fewer rows are faster by our kernel, which reads no rows but theirs."""
_ALIGNMENT = 256
"""Of memory, in bytes: the library's choice follows from less."""


def divide_no_sums() -> None:
    """Ask the library not to divide sums, in this process."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul = torch.backends.cuda.matmul
    # The second says whether sums may be divided.
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    matmul.allow_fp16_reduced_precision_reduction = (False, False)


def agreeing_sizes(x: Tensor, weight: Tensor, out: Tensor, shape: Shape | None) -> tuple[int, ...]:
    """Numbers of rows, ascending, for which the library gives the bits of ``fixed_linear``.

    x: [T, K]; weight: [M, K]; out: [R, M]; x and out are overwritten. shape: of our kernel, where
    it has one for all numbers of rows.
    """
    if weight.element_size() > 2 or not _aligned(x, weight, out):
        return ()
    most = min(len(x), len(out))
    x[:most].normal_(generator=torch.Generator(x.device).manual_seed(0))
    return tuple(size for size in _SIZES if size <= most and _agrees(x, weight, out, shape, size))


def _agrees(x: Tensor, weight: Tensor, out: Tensor, shape: Shape | None, size: int) -> bool:
    try:
        torch.mm(x[:size], weight.t(), out=out[:size])
    except RuntimeError:
        return False  # it has no kernel that divides no sum
    ours = out.new_empty(_COMPARED, len(weight))
    for first in range(0, size, _COMPARED):
        part = slice(first, first + _COMPARED)
        if not torch.equal(out[part], fixed_linear(x[part], weight, None, ours, shape)):
            return False
    return True


def pieces(rows: int, sizes: tuple[int, ...], most: int) -> Iterator[tuple[int, int]]:
    """How the library computes so many rows: for each piece its rows, and the agreeing size that
    they are filled up to, 0 for our kernel.

    most: rows, those of the step included, that memory is there for.
    """
    done = 0
    while done < rows:
        left, room = rows - done, most - done
        fitting = [size for size in sizes if size <= room]
        enough = [size for size in fitting if left <= size < 2 * left]
        if left < _LEAST_ROWS or not (enough or (fitting and fitting[0] <= left)):
            yield left, 0
            return
        size = enough[0] if enough else max(size for size in fitting if size <= left)
        yield min(left, size), size
        done += size


def fixed_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    sizes: tuple[int, ...],
    shape: Shape | None,
) -> Tensor:
    """Writes ``out``, and returns it. x: [N, K]; out: [N, M]; both the first rows of buffers whose
    next ones hold nothing that is needed. sizes: from ``agreeing_sizes``; shape: as there."""
    if bias is not None or not sizes or len(x) < _LEAST_ROWS:
        return fixed_linear(x, weight, bias, out, shape)
    done = 0
    for rows, size in pieces(len(x), sizes, min(_room(x), _room(out))):
        first, target = x[done:], out[done:]
        if size and _aligned(first, weight, target):
            torch.mm(_widened(first, size), weight.t(), out=_widened(target, size))
        else:
            fixed_linear(first[:rows], weight, None, target[:rows], shape)
        done += rows
    return out


def _aligned(*memory: Tensor) -> bool:
    return all(each.data_ptr() % _ALIGNMENT == 0 for each in memory)


def _room(rows: Tensor) -> int:
    """How many rows the memory of these has from the first one on."""
    numbers = rows.untyped_storage().nbytes() // rows.element_size() - rows.storage_offset()
    return numbers // rows.shape[1]


def _widened(rows: Tensor, count: int) -> Tensor:
    """``count`` rows from the first one on, also past the last one."""
    return rows.as_strided((count, rows.shape[1]), (rows.shape[1], 1))
