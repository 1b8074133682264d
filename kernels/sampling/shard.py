"""The part of a vocabulary whose logits one rank of several has."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Shard(NamedTuple):
    """Ranks have neighbouring columns, in the order of their shares. All ranks call ``gather`` and
    ``columns`` in the same order, with the same number of rows."""

    first: int
    """The token of this rank's first column."""
    vocab: int
    """Tokens of all ranks."""
    draws: bool
    """Whether this is the first rank: it chooses where all columns are needed."""
    gather: Callable[[Tensor], Tensor]
    """What every rank gives, [shares, ...], in the order of the ranks, on all of them."""
    columns: Callable[[Tensor], Tensor]
    """[R, V]: the columns of all side by side; on others than the first perhaps anything."""
