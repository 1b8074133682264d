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
- ``yarn``: the same by the number of turns that a pair makes within the trained length; cos and sin
  are multiplied by an attention factor (Peng et al., "YaRN", 2023).
- ``longrope``: each frequency is divided by a factor of its own, of which the checkpoint has two
  sets: for sequences within the trained length, and for longer ones (Ding et al., "LongRoPE",
  2024). A server takes one set for all its sequences (``for_length``): keys that are cached with
  one set are of no use with the other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.kernels.rope_parameters import ROPE_TYPES, RopeParameters

ROWS_AT_ONCE = 64

__all__ = [
    "ROPE_TYPES",
    "RopeParameters",
    "apply_rotary",
    "cos_sin_table",
    "inverse_frequencies",
]


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
        case "yarn":
            return _yarn_frequencies(head_dim, exponents, rope)
        case "longrope":
            factors = torch.tensor(rope.short_factors, dtype=torch.float32)
            return 1.0 / (factors * rope.theta**exponents)
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


def _yarn_frequencies(dim: int, exponents: Tensor, rope: RopeParameters) -> Tensor:
    trained = rope.original_max_position_embeddings

    def pair_with(turns: float) -> float:
        """The pair, not a whole number, that turns so often within the trained length."""
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    slow = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    powers = rope.theta**exponents
    return slow / (rope.factor * powers) + (1 - slow) / powers


def cos_sin_table(
    head_dim: int, max_positions: int, rope: RopeParameters, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Tables for every position below ``max_positions``, as ``apply_rotary`` takes them.

    Two [max_positions, D] fp32: cos twice; -sin, then sin. The angles are formed in fp32, as the
    checkpoints' own modelling code does.
    """
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(head_dim, rope))
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return torch.cat((cos, cos), -1).to(device), torch.cat((-sin, sin), -1).to(device)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every head of every row.

    x: [N, H, D] fp32, bf16 or fp16 (any strides); cos, sin: [N, 1, D] fp32, the tables' rows at
    the rows' positions. Returns a new contiguous [N, H, D] fp32. Products and sums round
    separately, so that a row's bits do not depend on its place in the batch. On the CPU many rows
    are computed a few at a time, so that what lies between stays in the cache.
    """
    if x.device.type != "cpu" or len(x) <= ROWS_AT_ONCE:
        return _rotated(x, cos, sin)
    out = x.new_empty(x.shape, dtype=torch.float32)
    for parts in zip(
        *(torch.split(each, ROWS_AT_ONCE) for each in (x, cos, sin, out)), strict=True
    ):
        rows, cosines, sines, into = parts
        into.copy_(_rotated(rows, cosines, sines))
    return out


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    swapped = torch.roll(x, x.shape[-1] // 2, -1)
    return (x * cos).add_(swapped * sin)
