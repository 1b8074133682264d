"""Temperature: z / T."""

from __future__ import annotations

from torch import Tensor

from penstock.kernels.sampling.samplers.distribution import Row


def reference(z: Row, temperature: float) -> Row:
    scaled: Row = (z - z.max()) / temperature
    return scaled


def apply(z: Tensor, temperature: float) -> Tensor:
    return (z - z.max()) / temperature
