"""The noise of a draw: a hash of (seed, choice, output position, token), and what it is bounded by.

The rule is that of ``penstock.kernels.sampling.gumbel``. A draw takes the highest logit /
temperature - log(e), e exponential. e takes two logarithms and a division to compute, but is never
below v, the hash as a number from 0 to 1, so most tokens can be passed by for the price of the
hash.
"""

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(-3.0e38)
"""A token that is kept is better than one that is not, whatever its noise."""
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _mix(x):
    """lowbias32 but for its last step, which leaves the higher 16 bits as they are."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x


@triton.jit
def coin_of(key_add, key_factor):
    """A number from 0 to 1 beside the noise of the tokens: it hashes 2^32 - 1, which is -1 here.
    Reference: ``penstock.kernels.sampling.samplers.xtc.coin``."""
    h = _mix(key_add - key_factor)
    h ^= h >> 16
    return (h.to(tl.float32) + 0.5) * 2.3283064365386963e-10


@triton.jit
def _splitmix64(z):
    """As ``penstock.kernels.draw_keys`` mixes; uint64."""
    z += 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def draw_key(seed_low, seed_high, num_output, slot):
    """The key of a slot's next token: what is added to a token's multiple, and the odd factor."""
    low = tl.load(seed_low + slot).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(seed_high + slot).to(tl.uint32, bitcast=True).to(tl.uint64)
    count = tl.load(num_output + slot).to(tl.uint64)
    key = _splitmix64(((high << 32) | low) ^ count)
    return (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32) | 1


@triton.jit
def least_noise(begin, steps):
    """[R]: a lower bound of v in each row, whose multiples are begin[:, None] + steps[None]."""
    return _bound(tl.min(_mix(begin[:, None] + steps[None, :]), 1))


@triton.jit
def least_noise_of(ids, key_add, key_factor):
    """A lower bound of each token's v."""
    return _bound(_mix(ids.to(tl.uint32) * key_factor + key_add))


@triton.jit
def _bound(h):
    """From the higher 16 bits, which are those of the hash."""
    return (h >> 16).to(tl.int32).to(tl.float32) * 1.52587890625e-05


@triton.jit
def may_win(value, least, top):
    """Whether logits / temperature up to ``value``, with v from ``least`` on, may exceed ``top``.

    value - log(e) > top needs v <= e < exp(value - top). The margin is far above the rounding
    errors of either side, which grow with top.
    """
    return least <= tl.exp2((value - top) * _LOG2_E + 0.002 + tl.abs(top) * 1e-6)


@triton.jit
def _minus_log1p_of_minus(v):
    """-log1p(-v), exact for small v too (Kahan's correction of the rounding of 1 - v)."""
    u = 1.0 - v
    return tl.where(u == 1.0, v, tl.log(u) * v / (u - 1.0))


@triton.jit
def with_noise(z, scale, ids, key_add, key_factor):
    """z * scale - log(e), by the same instructions wherever a token is looked at."""
    h = _mix(ids.to(tl.uint32) * key_factor + key_add)
    h ^= h >> 16
    v = (h.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return tl.fma(z, scale, -tl.log(_minus_log1p_of_minus(v)))
