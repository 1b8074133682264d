"""Tokens that alone may come: the others' logits become -inf.

The set is a bitmask, 32 tokens an int32: token t is bit t % 32 of word t // 32, 1 where it is
allowed; that is the layout of xgrammar's ``apply_token_bitmask_inplace``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.sampling.rows import IntArray


def mask_words(vocab: int) -> int:
    """int32 words of a bitmask over a vocabulary."""
    return -(-vocab // 32)


def allowed_mask(tokens: npt.ArrayLike, vocab: int) -> npt.NDArray[np.int32]:
    """The bitmask of these token ids, [ceil(V / 32)] int32."""
    bits = np.zeros(32 * mask_words(vocab), np.uint8)
    bits[np.asarray(tokens, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


class AllowedTokens(NamedTuple):
    """An adjustment of the A rows ``rows``, ascending."""

    rows: IntArray
    masks: Tensor
    """[A, ceil(V / 32)] int32, on the logits' device."""
    first: int = 0
    """The token of the logits' first column."""

    def apply(self, logits: Tensor, place: IntArray) -> None:
        """Ban in place; see ``Adjustment``."""
        begin, end = self.first, self.first + logits.shape[1]
        words = self.masks[:, begin // 32 : mask_words(end)]
        bit = torch.arange(32, dtype=torch.int32, device=logits.device)
        banned = words[:, :, None].bitwise_right_shift(bit).bitwise_and_(1).eq_(0)
        ahead = begin // 32 * 32
        banned = banned.view(len(words), -1)[:, begin - ahead : end - ahead].to(torch.bool)
        if len(self.rows) == len(logits):
            logits.masked_fill_(banned, -torch.inf)
        else:
            at = torch.from_numpy(place[self.rows]).to(logits.device)
            logits[at] = logits[at].masked_fill_(banned, -torch.inf)
