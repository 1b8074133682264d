"""Drawing a token from softmax(scaled logits).

The Gumbel-max trick (Gumbel, 1954): argmax of scaled logit - log(e) with e exponential. e is a
hash of the row's key words (k0, k1) and the token id, in 32-bit integers:

    h = lowbias32(id * (k1 | 1) + k0);  v = (h + 0.5) * 2**-32;  e = -log1p(-v)

lowbias32 is Chris Wellons' integer hash (nullprogram.com, "Prospecting for Hash Functions",
2018). No state, no order: the same key draws the same numbers in any batch and on any device.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_HASH_ELEMENTS = 256 * 1024
"""Tokens hashed at once: the temporaries stay in a core's cache."""
_LOWBIAS32 = ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32))


def draw(scaled: Tensor, ids: Tensor, keys: Tensor) -> Tensor:
    """Gumbel-max over each row. scaled: [R, C] fp32; ids: [R or 1, C] int32 token ids of the
    columns; keys: [2, R] int32. Returns the chosen column of each row, [R] int64."""
    return torch.cat([noisy.argmax(-1) for noisy in _noisy(scaled, ids, keys)])


def best(scaled: Tensor, ids: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """``draw``, and ahead of it what each chosen column reaches, noise included, [R] fp32."""
    values, chosen = [], []
    for noisy in _noisy(scaled, ids, keys):
        chosen.append(noisy.argmax(-1))
        values.append(noisy.gather(1, chosen[-1][:, None])[:, 0])
    return torch.cat(values), torch.cat(chosen)


def _noisy(scaled: Tensor, ids: Tensor, keys: Tensor) -> Iterator[Tensor]:
    """What the columns of some rows reach, then of the next ones."""
    count, width = scaled.shape
    at_once = max(1, _HASH_ELEMENTS // width)
    for first in range(0, count, at_once):
        part = slice(first, first + at_once)
        names = ids if ids.shape[0] == 1 else ids[part]
        noise = exponential(names, keys[:, part]).log_()
        yield scaled[part] - noise


def exponential(ids: Tensor, keys: Tensor) -> Tensor:
    """Standard exponential numbers of tokens. ids: [R or 1, C] int32; keys: [2, R] int32.
    Returns [R, C] fp32."""
    h = _lowbias32((ids * (keys[1] | 1)[:, None]).add_(keys[0][:, None]))
    unsigned = h.to(torch.int64).bitwise_and_(0xFFFFFFFF)
    v = unsigned.to(torch.float32).add_(0.5).mul_(2.0**-32)
    return v.neg_().log1p_().neg_()


def _lowbias32(x: Tensor) -> Tensor:
    """In place on int32, whose products wrap around; shifts are made logical by masks."""
    for shift, factor in _LOWBIAS32:
        x ^= (x >> shift).bitwise_and_((1 << (32 - shift)) - 1)
        x *= factor
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x
