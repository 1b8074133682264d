"""Rotary position embedding.

For the pair (x[i], x[i + D/2]) at position p, with the angle a = p * inv_freq[i]:

    y[i]       = x[i] * cos(a) - x[i + D/2] * sin(a)
    y[i + D/2] = x[i + D/2] * cos(a) + x[i] * sin(a)

Source: Su et al., "RoFormer" (2021), in the half-split pairing of Llama checkpoints. Scalings:

- ``linear``: positions divided by ``factor`` (Chen et al., "Position Interpolation", 2023).
- ``dynamic``: the base grows once a sequence passes the trained length (NTK-aware scaling). A
  server that never exceeds ``max_position_embeddings`` sees the unscaled frequencies.
- ``llama3``: frequencies by wavelength are kept, divided by ``factor``, or blended in between
  (Llama 3.1 model code).
"""

from __future__ import annotations

import math

import msgspec
import torch
from torch import Tensor

ROPE_TYPES = ("default", "linear", "dynamic", "llama3")


class RopeParameters(msgspec.Struct, frozen=True):
    """What a checkpoint's config says about rotary embedding."""

    theta: float
    rope_type: str = "default"
    """One of ``ROPE_TYPES``."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


def inverse_frequencies(head_dim: int, rope: RopeParameters) -> Tensor:
    """[head_dim / 2] fp32. Raises ``ValueError`` for a type not in ``ROPE_TYPES``."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (rope.theta**exponents)
    match rope.rope_type:
        case "default" | "dynamic":
            return plain
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3_frequencies(plain, rope)
    raise ValueError(f"rope type {rope.rope_type!r}: expected one of {', '.join(ROPE_TYPES)}")


def _llama3_frequencies(plain: Tensor, rope: RopeParameters) -> Tensor:
    trained = rope.original_max_position_embeddings
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    smooth = (trained / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    scaled = torch.where(wavelength > trained / low, plain / rope.factor, plain)
    between = (wavelength >= trained / high) & (wavelength <= trained / low)
    return torch.where(between, blended, scaled)


def cos_sin_table(
    head_dim: int, max_positions: int, rope: RopeParameters, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Tables for every position below ``max_positions``, as ``apply_rotary`` takes them.

    Two [max_positions, D] fp32: cos twice; -sin, then sin. The angles are formed in fp32, as the
    checkpoints' own modelling code does.
    """
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(head_dim, rope))
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(device), torch.cat((-sin, sin), -1).to(device)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every head of every row.

    x: [N, H, D] fp32, bf16 or fp16 (any strides); cos, sin: [N, 1, D] fp32, the tables' rows at
    the rows' positions. Returns a new contiguous [N, H, D] fp32. Products and sums round
    separately, so that a row's bits do not depend on its place in the batch.
    """
    swapped = torch.roll(x, x.shape[-1] // 2, -1)
    return (x * cos).add_(swapped * sin)
