"""What the attention kernels are called with, grouped: in this order their fields are the kernels'
arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.quantized_cache import is_quantized

LOG2_E = 1.4426950408889634
_LEAST_HALF = 16
"""What a product of matrices takes at least."""


def padded_half(dim: int) -> int:
    """The width with which half a head of ``dim`` is computed: a power of two. In memory it is as
    wide as it is."""
    return max(_LEAST_HALF, 1 << (dim // 2 - 1).bit_length())


class DecodeBatch(NamedTuple):
    """The decode rows of a step."""

    rows: Tensor
    """[N] int32: the slot of each, behind them -1 for padding."""
    last_position: Tensor
    """[slots] int32: where each slot's new token goes, which is also how many of its positions are
    cached."""
    table: Tensor
    """[slots, W] int32: the slots' block tables; an entry is an index into a layer's keys and
    values."""


class HeadInputs(NamedTuple):
    """What queries and keys are rotated with, and normed where the model has such norms."""

    cos: Tensor
    """[P, D / 2] fp32."""
    sin: Tensor
    query_weight: Tensor | None
    """[D]; ``None``, as the other one: heads are not normed."""
    key_weight: Tensor | None


LayerTensors = Sequence[Tensor] | Tensor
"""Keys or values of each layer, [entries, Hkv, block_size, D] each, contiguous. Layers may share
memory, as long as their entries do not."""


class LayerCache(NamedTuple):
    """[entries, Hkv, block_size, D] each, contiguous; D is more of a quantized cache."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    """The memory of ``keys`` in fp32, where they are quantized: see ``quantized_cache``."""
    value_scales: Tensor | None = None


def layer_cache(keys: Tensor, values: Tensor) -> LayerCache:
    if not is_quantized(keys.dtype):
        return LayerCache(keys, values)
    scales = (cache.view(torch.int8).view(torch.float32) for cache in (keys, values))
    return LayerCache(keys, values, *scales)


class Scores(NamedTuple):
    """How a layer's scores are made: see ``specification.Attention``."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    """Whether the kernels are given sinks."""
    chunk: int = 0

    @property
    def local(self) -> bool:
        """Whether rows do not see all positions up to their own."""
        return self.window > 0 or self.chunk > 0

    @property
    def plain(self) -> bool:
        """Whether each row sees all positions up to its own, with scores that are only scaled."""
        return not (self.local or self.softcap or self.sinks)

    @property
    def in_binary(self) -> tuple[float, float]:
        """Scale and soft cap times log2(e)."""
        return self.scale * LOG2_E, self.softcap * LOG2_E


class ListedBlocks(NamedTuple):
    """Blocks that rows see besides their window or chunk, as far as they lie ahead of it."""

    numbers: Tensor | None
    """int32, of one slot after the other, ascending; each slot's end with ``PAST_ALL``."""
    stride: int | None
    """From one slot's to the next one's; 0: all have the same."""
    most: int | None
    """Numbers of a slot."""

    @property
    def bits(self) -> int:
        return 0 if self.most is None else self.most.bit_length()


PAST_ALL = 2**31 - 1
NOTHING_LISTED = ListedBlocks(None, None, None)


def listed_blocks(mask: npt.NDArray[np.bool_], device: torch.device) -> ListedBlocks:
    """mask: [S, W] of each slot's blocks, or [1, W] of all slots'."""
    counts = mask.sum(axis=1)
    numbers = np.full((len(mask), max(1, int(counts.max()))), PAST_ALL, np.int32)
    for row, (chosen, count) in enumerate(zip(mask, counts, strict=True)):
        numbers[row, :count] = np.flatnonzero(chosen)
    slots, most = numbers.shape
    stride = most if slots > 1 else 0
    return ListedBlocks(torch.from_numpy(numbers).to(device), stride, most)


def binary_scales(scales: Sequence[float], layers: int, dim: int) -> list[float]:
    """Of each layer, times log2(e); none given: 1 / sqrt(dim) for all."""
    return [scale * LOG2_E for scale in scales or [dim**-0.5] * layers]
