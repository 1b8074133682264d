"""Keys of the counter-based random numbers that sampling uses.

A draw is keyed by (seed, choice, output position) alone, so it is the same whatever else is in
the batch and whichever device computes it. The 64 bits come from the finalizer of splitmix64
(Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014), applied once for
each of the three numbers. This module needs numpy only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S32 = (np.uint64(n) for n in (27, 30, 31, 32))
_LOW = np.uint64(0xFFFFFFFF)


def _mix(z: UInt64Array) -> UInt64Array:
    z = z + _GOLDEN
    z = (z ^ (z >> _S30)) * _FIRST
    z = (z ^ (z >> _S27)) * _SECOND
    return z ^ (z >> _S31)


def draw_keys(seed: UInt64Array, choice: UInt64Array, position: UInt64Array) -> UInt64Array:
    """One 64-bit key for each row. seed, choice, position: [N] uint64. Wraps around silently."""
    return _mix(draw_bases(seed, choice) ^ position)


def draw_bases(seed: UInt64Array, choice: UInt64Array) -> UInt64Array:
    """What ``draw_keys`` mixes with the position: it stays the same for a whole sequence."""
    return _mix(_mix(seed) ^ choice)


def key_words(keys: UInt64Array) -> npt.NDArray[np.int32]:
    """The low and the high word of each key: [N] uint64 → [2, N] int32 (bits, not values)."""
    words = np.stack((keys & _LOW, keys >> _S32)).astype(np.uint32)
    return words.view(np.int32)
