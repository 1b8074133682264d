"""Tiles of compressed weights, bf16 again in registers on Hopper: device functions of
``compressed_linear_hopper``.

Reference: ``compressed_weights.restore``, where the form is described.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# $0 to $3: pairs of bf16; $4, $5: words of ``low``; $6: of ``high``. Each pair is its two bytes of
# low and the constant upper half of the exponent, with sign and lower half from high rotated right.
_RESTORE = gl.constexpr("""{
.reg .b32 bytes, rotated;
prmt.b32 bytes, $4, 0x38383838, 0x4140;
lop3.b32 $0, $6, 0x87008700, bytes, 0xEA;
prmt.b32 bytes, $4, 0x38383838, 0x4342;
shf.r.wrap.b32 rotated, $6, $6, 4;
lop3.b32 $1, rotated, 0x87008700, bytes, 0xEA;
prmt.b32 bytes, $5, 0x38383838, 0x4140;
shf.r.wrap.b32 rotated, $6, $6, 8;
lop3.b32 $2, rotated, 0x87008700, bytes, 0xEA;
prmt.b32 bytes, $5, 0x38383838, 0x4342;
shf.r.wrap.b32 rotated, $6, $6, 12;
lop3.b32 $3, rotated, 0x87008700, bytes, 0xEA;
}""")


@gluon.jit
def _numbers(words):
    """[16, 32] words as [16, 32, 2] bf16."""
    both = words.expand_dims(2).broadcast_to([16, 32, 2])
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r", [both], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def entry_at(listed, index):
    """The exception at ``index``, a scalar."""
    plain: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(listed.index(index).load(plain), 0)


@gluon.jit
def restore_tile(lows, highs, left: gl.constexpr, listed, index, entry, now):
    """Tile ``now`` of the part as [64, 64] bf16 in registers of the first operand; the place of the
    next exception, and that. lows: [32, 32]; highs: [16, 32]."""
    pairs: gl.constexpr = gl.BlockedLayout([1, 4, 2], [4, 8, 1], [4, 1, 1], [2, 1, 0])
    plain: gl.constexpr = gl.SliceLayout(2, pairs)
    a, b, c, d = gl.inline_asm_elementwise(
        _RESTORE, "=&r,=&r,=&r,=&r,r,r,r",
        [lows.slice(0, 16).load(plain), lows.slice(16, 16).load(plain), highs.load(plain)],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    word = (
        gl.arange(0, 16, gl.SliceLayout(1, plain))[:, None] * 32
        + gl.arange(0, 32, gl.SliceLayout(0, plain))[None, :]
    )
    while (entry >> 43) == now:
        beyond = (entry >> 32 & 0x7FF).to(gl.int32) - word
        numbers = entry.to(gl.int32)
        a = gl.where(beyond == 0, numbers, a)
        b = gl.where(beyond == 512, numbers, b)
        c = gl.where(beyond == 1024, numbers, c)
        d = gl.where(beyond == 1536, numbers, d)
        index += 1
        entry = entry_at(listed, index)
    near = gl.join(_numbers(a), _numbers(b))
    far = gl.join(_numbers(c), _numbers(d))
    bits = gl.join(near, far).reshape([2] * 12)
    # Of a word: warp, thread / 8; thread % 8, v. Of its number: column's lowest bit, row's bit of
    # eight, column's bit of eight.
    tile = bits.permute((0, 1, 10, 2, 3, 4, 7, 8, 11, 5, 6, 9)).reshape([64, 64])
    return gl.convert_layout(tile, left, assert_trivial=True), index, entry
