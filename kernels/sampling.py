"""Choosing the next token of every row.

Greedy rows (temperature below ``GREEDY_TEMPERATURE``) take the highest logit. The others draw
from softmax(logits / temperature), restricted first to the ``top_k`` highest logits, then to the
smallest set of likeliest tokens whose probability (among those left by top-k) reaches ``top_p``.
Tokens that tie with the last one kept are kept too, so the set does not depend on a sort's order.

The draw is the Gumbel-max trick (Gumbel, 1954): argmax of logit / temperature - log(e) with e
exponential. e is a hash of the row's key words (k0, k1) and the token id, in 32-bit integers:

    h = lowbias32(lowbias32(id ^ k0) + k1);  v = (h + 0.5) * 2**-32;  e = -log1p(-v)

lowbias32 is Chris Wellons' integer hash (nullprogram.com, "Prospecting for Hash Functions",
2018). No state, no order: the same key draws the same numbers in any batch and on any device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.draw_keys import UInt64Array, key_words

CANDIDATES = 1024
"""Top-k up to this, and top-p where it reaches so far, are decided without sorting a whole row."""
_HASH_ELEMENTS = 256 * 1024
"""Tokens hashed at once: the temporaries stay in a core's cache."""
_LOWBIAS32 = ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32))


class SamplingRows(NamedTuple):
    """What each of the R rows asks for; host arrays."""

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    """0 or less: all."""
    top_p: npt.NDArray[np.float32]
    keys: UInt64Array
    """From ``draw_keys``."""

    def take(self, index: npt.NDArray[np.int64]) -> SamplingRows:
        return SamplingRows(
            self.temperature[index], self.top_k[index], self.top_p[index], self.keys[index]
        )


def bad_rows(logits: Tensor) -> Tensor:
    """[R] bool: rows of ``logits`` [R, V] that hold a NaN or an infinity.

    One reading pass: a sum is finite exactly if its terms are (finite logits that overflow fp32
    when summed are no better).
    """
    return logits.sum(-1, dtype=torch.float32).isfinite().logical_not_()


def sample(logits: Tensor, rows: SamplingRows, greedy_below: float) -> Tensor:
    """The chosen token of every row.

    logits: [R, V] fp32, bf16 or fp16 (not changed). Returns [R] int64 on the same device, always
    in 0 … V - 1, also for rows that are not finite. A row's result depends on that row alone.
    """
    vocab = logits.shape[1]
    greedy = rows.temperature < greedy_below
    if greedy.all():
        return most_likely(logits)
    limited = ~greedy & (((rows.top_k > 0) & (rows.top_k < vocab)) | (rows.top_p < 1.0))
    tokens = torch.empty(len(greedy), dtype=torch.int64, device=logits.device)
    for mask, choose in (
        (greedy, _greedy),
        (limited, _draw_limited),
        (~greedy & ~limited, _draw_plain),
    ):
        index = np.flatnonzero(mask)
        if len(index) == len(greedy):
            return choose(logits, rows)
        if len(index):
            where = torch.from_numpy(index).to(logits.device)
            part = rows.take(index)
            tokens[where] = choose(logits.index_select(0, where), part)
    return tokens


def most_likely(logits: Tensor) -> Tensor:
    """The highest logit's token, the lowest of those that tie. logits: [R, V]; returns [R] int64.

    Not ``argmax``, which on the CPU takes three to six times as long for bf16.
    """
    return logits.max(-1).indices


def _greedy(logits: Tensor, rows: SamplingRows) -> Tensor:
    return most_likely(logits)


def _draw_plain(logits: Tensor, rows: SamplingRows) -> Tensor:
    vocab = logits.shape[1]
    ids = torch.arange(vocab, dtype=torch.int32, device=logits.device)[None, :]
    return _draw(_scaled(logits, rows), ids, _device_keys(rows, logits.device))


def _draw_limited(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Rows with top-k or top-p: decided on the highest ``CANDIDATES`` logits where they suffice."""
    scaled = _scaled(logits, rows)
    device, vocab = logits.device, logits.shape[1]
    width = min(CANDIDATES, vocab)
    highest, ids = scaled.topk(width, dim=-1)
    top_p = torch.from_numpy(rows.top_p).to(device)[:, None]
    count = np.where((rows.top_k > 0) & (rows.top_k < vocab), rows.top_k, vocab)
    floor, settled = _floor(highest, scaled, torch.from_numpy(count).to(device), top_p)
    keys = _device_keys(rows, device)
    shown = highest.masked_fill(highest < floor, -torch.inf)
    chosen = _draw(shown, ids.to(torch.int32), keys)
    tokens = ids.gather(1, chosen[:, None])[:, 0]
    if width < vocab:
        rest = settled.logical_not().nonzero()[:, 0]
        if len(rest):
            tokens[rest] = _draw_sorted(
                scaled[rest], count[rest.cpu().numpy()], top_p[rest], keys[:, rest]
            )
    return tokens


def _draw_sorted(
    scaled: Tensor, count: npt.NDArray[np.int64], top_p: Tensor, keys: Tensor
) -> Tensor:
    """Rows whose limit lies beyond the candidates: sort them whole."""
    ordered = scaled.sort(dim=-1, descending=True).values
    floor, _ = _floor(ordered, scaled, torch.from_numpy(count).to(scaled.device), top_p)
    ids = torch.arange(scaled.shape[1], dtype=torch.int32, device=scaled.device)[None, :]
    return _draw(scaled.masked_fill(scaled < floor, -torch.inf), ids, keys)


def _floor(ordered: Tensor, scaled: Tensor, count: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest logit that top-k and top-p keep, and whether ``ordered`` sufficed to find it.

    ordered: [R, W] the W highest of ``scaled`` [R, V], descending; count: [R] int64, top-k or V;
    top_p: [R, 1]. Returns [R, 1] and [R] bool.
    """
    width, vocab = ordered.shape[1], scaled.shape[1]
    count = count[:, None]
    last = ordered.gather(1, (count - 1).clamp(max=width - 1))
    weights = (ordered - ordered[:, :1]).exp_()
    weights.masked_fill_(ordered < last, 0.0)
    before = weights.cumsum(-1, dtype=torch.float64) - weights
    # Without top-k the weights beyond the candidates count too.
    all_weights = (scaled - ordered[:, :1]).exp_().sum(-1, keepdim=True, dtype=torch.float64)
    kept_weights = before[:, -1:] + weights[:, -1:]
    total = torch.where(count <= width, kept_weights, all_weights)
    inside = (before < top_p * total).logical_and_(ordered >= last)
    inside[:, 0] = True
    number = inside.sum(-1, keepdim=True)
    floor = ordered.gather(1, number - 1)
    settled = (count <= width) | ((count >= vocab) & (number < width))
    return floor, settled[:, 0] | (width == vocab)


def _scaled(logits: Tensor, rows: SamplingRows) -> Tensor:
    """fp32 logits over the temperatures."""
    temperature = torch.from_numpy(rows.temperature).to(logits.device)
    return logits.float() / temperature[:, None]


def _device_keys(rows: SamplingRows, device: torch.device) -> Tensor:
    """[2, R] int32."""
    return torch.from_numpy(key_words(rows.keys)).to(device)


def _draw(scaled: Tensor, ids: Tensor, keys: Tensor) -> Tensor:
    """Gumbel-max over each row. scaled: [R, C] fp32; ids: [R or 1, C] int32 token ids of the
    columns; keys: [2, R] int32. Returns the chosen column of each row, [R] int64."""
    count, width = scaled.shape
    at_once = max(1, _HASH_ELEMENTS // width)
    chosen = []
    for first in range(0, count, at_once):
        part = slice(first, first + at_once)
        names = ids if ids.shape[0] == 1 else ids[part]
        noise = exponential(names, keys[:, part]).log_()
        chosen.append((scaled[part] - noise).argmax(-1))
    return torch.cat(chosen)


def exponential(ids: Tensor, keys: Tensor) -> Tensor:
    """Standard exponential numbers of tokens. ids: [R or 1, C] int32; keys: [2, R] int32.
    Returns [R, C] fp32."""
    h = _lowbias32(ids ^ keys[0][:, None])
    h = _lowbias32(h.add_(keys[1][:, None]))
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
