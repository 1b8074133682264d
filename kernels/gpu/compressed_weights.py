"""Weights in 12 bits a number, exactly: what ``compressed_linear_hopper`` reads.

A bf16 number is a sign, 8 bits of exponent and 7 of mantissa, and nearly all weights of a row have
one of 16 exponents that follow each other, up to that of the row's largest. So 4 bits name the
exponent, and a factor of a power of two for each row of W says which 16 they are. Nothing is
rounded. That trained weights' exponents say so little is known from DFloat11 (Zhang et al. 2025),
which codes them in variable lengths; a fixed length takes a bit more and is undone in a few
instructions; the reference is ``restore``. The few numbers below the 16 exponents, zeros among
them, are *exceptions*: they are listed, and put in their places where the others are restored.

A tile is 64 rows and 64 columns. Its numbers lie in the order in which registers hold the first
operand of a Hopper matrix product: those of thread t of warp w are in the rows 16 w + t / 4 and 8
below, and the columns 16 v + 2 (t % 4), the next, and both 8 further. A *word* is a warp, thread
and v; its eight numbers are four pairs of neighbours, number 0 the first, 1 the one 8 rows below, 2
and 3 those 8 columns further.

    low     [2, words]: four bytes ``exponent % 2, mantissa``, of the pairs 0 and 1, and 2 and 3
    high    [words]: sign and exponent / 2 of all eight; of a pair with number j, rotated right by
            4 j bits, in bits 15 and 8 to 10, and in 31 and 24 to 26
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64
"""Rows and columns of a tile."""
END = 1 << 60
"""An exception behind all tiles."""
CAPACITY = 256
"""Exceptions and the ``END`` behind them that fit a part of the width of 64 rows of W. More would
cost more time than the compressed form saves."""
_EXPONENTS = 16
_NOT_FINITE = 255
"""The exponent of infinities and of what is no number."""
_ROWS_AT_ONCE = 8192
"""Rows of W that are searched for exceptions at once; the memory that takes is freed again."""


class CannotCompress(Exception):
    """Says why."""


class CompressedWeight(NamedTuple):
    """W [N, K] in blocks of 64 rows: of a gated product half of them gate, half up.

    A *part* is a block's share of the width where programs share it.
    """

    low: Tensor
    """[tiles * 2 * words / 32, 32] int32; the tiles of a block one after the other."""
    high: Tensor
    """[tiles * words / 32, 32] int32."""
    scales: Tensor
    """[N] fp32, in the blocks' order: what the sums of a row are multiplied by."""
    exceptions: Tensor
    """[parts, most] int64: tile of the part << 43 | number of the pair << 41 | word << 32 | the
    pair's bits, both numbers in units of their row's scale. In the order of tiles; the rest is
    ``END``, at least one in a part."""

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self)


@triton.jit
def _compress_kernel(weight, tops, low, high, WIDTH: tl.constexpr, HALF: tl.constexpr):
    """One tile. ``HALF``: rows of W to the up half of a gated product; 0: it is plain."""
    block = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    word = tl.arange(0, 512)[:, None]
    number = tl.arange(0, 8)[None, :]
    thread = word // 4 % 8 + word // 32 % 4 * 8
    row = word // 128 * 16 + number // 2 % 2 * 8 + thread // 4
    column = word % 4 * 16 + number // 4 * 8 + thread % 4 * 2 + number % 2
    if HALF:
        line = block * 32 + row % 32 + row // 32 * HALF
    else:
        line = block * 64 + row
    bits = tl.load(weight + line * WIDTH + tile * 64 + column).to(tl.int32)
    exponent = bits >> 7 & 0xFF
    code = tl.where(exponent > 0, tl.maximum(exponent - (tl.load(tops + line) - 15), 0), 0)
    byte = (code & 1) << 7 | bits & 0x7F
    sign = bits >> 15 & 1
    pair = number // 2
    base = 4 * pair + 16 * (number % 2)
    piece = (code >> 1) << (base + 8) % 32 | sign << (base + 15) % 32
    here = block * tl.num_programs(1) + tile
    bytes_at = byte << number % 4 * 8
    first = tl.sum(tl.where(number < 4, bytes_at, 0), 1)
    second = tl.sum(tl.where(number < 4, 0, bytes_at), 1)
    at = tl.arange(0, 512)
    tl.store(low + here * 1024 + at, first)
    tl.store(low + here * 1024 + 512 + at, second)
    tl.store(high + here * 512 + at, tl.sum(piece, 1))


def lines_of_blocks(rows: int, gated: bool) -> Tensor:
    """[N / 64, 64] int64: which row of W each row of a block is."""
    lines = torch.arange(rows)
    if gated:
        return lines.view(2, -1, TILE // 2).transpose(0, 1).reshape(-1, TILE)
    return lines.view(-1, TILE)


def compress(weight: Tensor, *, gated: bool = False, splits: int = 1) -> CompressedWeight:
    """weight: [N, K] bf16, contiguous, N and K multiples of 64; gated: [gate; up]. splits: programs
    that share the width, K / ``splits`` a multiple of 64. Of one on the meta device the form is
    given, without numbers.

    Raises ``CannotCompress`` where it has too many exceptions, or numbers that cannot be kept
    exactly: not finite, subnormal in all of a row, or more than 2^100 times smaller than others.
    """
    rows, width = weight.shape
    bits, device = weight.view(torch.int16), weight.device
    tops = torch.empty(rows, dtype=torch.int32, device=device) if weight.is_meta else _tops(bits)
    low = torch.empty(rows * width // 4 // 32, 32, dtype=torch.int32, device=device)
    high = torch.empty(rows * width // 8 // 32, 32, dtype=torch.int32, device=device)
    _compress_kernel[(rows // TILE, width // TILE)](
        bits, tops, low, high, width, rows // 2 if gated else 0
    )
    if weight.is_meta:
        exceptions = torch.empty(rows // TILE * splits, 16, dtype=torch.int64, device=device)
        return CompressedWeight(low, high, tops.view(torch.float32), exceptions)
    order = lines_of_blocks(rows, gated).to(device).flatten()
    exceptions = _listed(*_exceptions(weight, tops, order, width // splits), rows, splits)
    scales = (tops << 23).view(torch.float32)[order]  # 2^(top - 127); 0 for a row of zeros
    return CompressedWeight(low, high, scales, exceptions)


def _tops(bits: Tensor) -> Tensor:
    """Each row's highest exponent. Raises ``CannotCompress``."""
    highest = (bits & 0x7FFF).amax(1).to(torch.int32)
    tops = highest >> 7
    if (tops == _NOT_FINITE).any():
        raise CannotCompress("numbers that are not finite")
    if ((tops == 0) & (highest > 0)).any():
        raise CannotCompress("a row of subnormal numbers")
    return tops


def _listed(parts: Tensor, entries: Tensor, rows: int, splits: int) -> Tensor:
    """``CompressedWeight.exceptions`` of W with so many rows, from the part of each entry."""
    device = entries.device
    counts = torch.bincount(parts, minlength=rows // TILE * splits)
    most = int(counts.max())
    if most >= CAPACITY:
        raise _too_many(f"{most} numbers in 64 rows")
    exceptions = torch.full((len(counts), most // 16 * 16 + 16), END, device=device)
    place = torch.arange(len(entries), device=device) - (counts.cumsum(0) - counts)[parts]
    exceptions[parts, place] = entries
    return exceptions


def _too_many(found: str) -> CannotCompress:
    return CannotCompress(
        f"{found} that are below 2^-15 of the largest of their row; at most {CAPACITY - 1} in 64 "
        "rows are taken"
    )


def _exceptions(
    weight: Tensor, tops: Tensor, order: Tensor, part_width: int
) -> tuple[Tensor, Tensor]:
    """Numbers of W [N, K] below the lowest exponent of their row: their parts, and their entries,
    in order.

    tops: [N], each row's highest exponent; order: [N], rows of W in the blocks' order.
    """
    # A row of zeros, whose scale is 0, has no exceptions.
    lowest = torch.where(tops > 0, (tops - (_EXPONENTS - 1)).clamp(min=1), 0).to(torch.int16)
    most = (CAPACITY - 1) * len(weight) // TILE * (weight.shape[1] // part_width)
    found, count = [], 0
    for first in range(0, len(weight), _ROWS_AT_ONCE):
        some = slice(first, first + _ROWS_AT_ONCE)
        exponents = (weight[some].view(torch.int16) & 0x7F80) >> 7
        places = (exponents < lowest[some, None]).nonzero()
        places[:, 0] += first
        found.append(places)
        count += len(places)
        if count > most:
            raise _too_many(f"{count} numbers and more")
    line, column = torch.cat(found).unbind(1)
    place_of = torch.empty_like(order)
    place_of[order] = torch.arange(len(order), device=order.device)
    part = place_of[line] // TILE * (weight.shape[1] // part_width) + column // part_width
    row, near = place_of[line] % TILE, column % TILE
    thread = row % 8 * 4 + near // 2 % 4
    word = row // 16 * 128 + thread * 4 + near // 16
    place = (near // 8 % 2 * 2 + row // 8 % 2) * 512 + word
    couple = torch.stack((column - column % 2, column - column % 2 + 1), 1)
    numbers = torch.ldexp(weight[line[:, None], couple].double(), 127 - tops[line][:, None])
    scaled = numbers.to(weight.dtype)
    if (scaled.double() != numbers).any():
        raise CannotCompress("numbers of too different magnitude in a row")
    bits = scaled.view(torch.int16).long() & 0xFFFF
    entry = column % part_width // TILE << 43 | place << 32 | bits[:, 1] << 16 | bits[:, 0]
    entry, by_tile = entry.sort()
    part, by_part = part[by_tile].sort(stable=True)
    return part, entry[by_part]


def restore(compressed: CompressedWeight, width: int, *, gated: bool = False) -> Tensor:
    """W [N, K] again, in float64, of one on the host. The reference of the compressed form."""
    rows = len(compressed.scales)
    low = compressed.low.view(rows // TILE, width // TILE, 2, 16, 8, 4).long()
    high = compressed.high.view(rows // TILE, width // TILE, 16, 8, 4).long() & 0xFFFFFFFF
    blocks = torch.zeros(rows // TILE, TILE, width // TILE, TILE, dtype=torch.float64)
    word = torch.arange(512)
    thread = word // 4 % 32
    for pair in range(4):
        for odd in range(2):
            byte = low[:, :, pair // 2].flatten(2) >> (pair % 2 * 16 + odd * 8) & 0xFF
            rotated = high.flatten(2) >> 4 * pair | high.flatten(2) << 32 - 4 * pair
            piece = rotated >> 16 * odd
            exponent = (piece >> 8 & 7) << 1 | byte >> 7
            sign = 1 - (piece >> 15 & 1) * 2
            number = sign * (1 + (byte & 0x7F).double() / 128) * 2.0 ** (exponent.double() - 15)
            row = word // 128 * 16 + pair % 2 * 8 + thread // 4
            column = word % 4 * 16 + pair // 2 * 8 + thread % 4 * 2 + odd
            blocks[:, row, :, column] = number.permute(2, 0, 1)
    splits = len(compressed.exceptions) // len(blocks)
    for part, entries in enumerate(compressed.exceptions.tolist()):
        for entry in entries[: entries.index(END)]:
            pair, word = divmod(entry >> 32 & 0x7FF, 512)
            thread = word // 4 % 32
            row = word // 128 * 16 + pair % 2 * 8 + thread // 4
            column = word % 4 * 16 + pair // 2 * 8 + thread % 4 * 2
            tile = part % splits * (width // TILE // splits) + (entry >> 43)
            bits = torch.tensor([entry & 0xFFFF, entry >> 16 & 0xFFFF]).to(torch.int16)
            numbers = bits.view(torch.bfloat16).double()
            blocks[part // splits, row, tile, column : column + 2] = numbers
    result = torch.empty(rows, width, dtype=torch.float64)
    scaled = blocks.flatten(2).flatten(0, 1) * compressed.scales.double()[:, None]
    result[lines_of_blocks(rows, gated).flatten()] = scaled
    return result
