"""Which slices of a checkpoint's tensors a part of a quantized weight needs."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.services.worker.checkpoint import Checkpoint
from penstock.services.worker.models.linear_shares import StoredPart
from penstock.services.worker.quantization.format import Role
from penstock.services.worker.weight_reading import DTYPES, StoredSlice


class FileSlice(NamedTuple):
    """A ``StoredSlice`` that has no memory yet."""

    name: str
    role: Role
    dtype: torch.dtype
    ranges: tuple[range, ...]
    """Of each dimension, of which there are at most two."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.ranges))

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def into(self, target: Tensor) -> StoredSlice:
        """target: of this shape."""
        return StoredSlice(self.name, target, *(each.start for each in self.ranges))


def slices_of(checkpoint: Checkpoint, prefix: str, part: StoredPart) -> dict[str, FileSlice]:
    """Of the tensors that files hold of a weight, by what follows its name. prefix: of the name."""
    found: dict[str, FileSlice] = {}
    for kind, tensor in part.tensors.items():
        name = f"{prefix}{part.name}{kind}"
        if name in checkpoint:
            entry = checkpoint.entry(name)
            ranges = tuple(part.entries(tensor, entry.shape))
            found[kind] = FileSlice(name, tensor.role, DTYPES[entry.dtype], ranges)
    return found
