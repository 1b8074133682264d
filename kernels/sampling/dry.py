"""DRY: a token that would repeat a sequence loses the more the longer that is (p-e-w, "DRY: A
modern repetition penalty", text-generation-webui, 2024).

For n tokens of prompt and output: where the L latest tokens have come before, z of the token that
followed there loses multiplier * base^(L - allowed), for the largest L of each token, if
L >= allowed. A *breaker* is a token that no sequence goes over. ``range`` latest tokens are looked
at, all of a sequence within them; 0: all.

Aphrodite also lowers what follows shorter sequences, by base^negative, and gives up after 12 tokens
of a sequence and 8 places; the documented rule does neither, nor does this. A penalty is
``MOST`` at most, which at any temperature is a ban.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.kernels.sampling.rows import FloatArray, IntArray
from penstock.kernels.sampling.suffix_matches import SuffixMatches, TokenMarks

MOST = 10_000.0


class DryRule(NamedTuple):
    multiplier: float
    base: float
    allowed: int
    range: int
    """0: all."""


def reference(
    z: npt.NDArray[np.float64], tokens: list[int], rule: DryRule, breakers: set[int]
) -> npt.NDArray[np.float64]:
    """One row, by the definition."""
    seen = tokens[-rule.range :] if rule.range else tokens
    longest: dict[int, int] = {}
    for place in range(len(seen) - 1):
        length = 0
        while length <= place and seen[place - length] == seen[len(seen) - 1 - length]:
            if seen[place - length] in breakers:
                break
            length += 1
        if length:
            longest[seen[place + 1]] = max(length, longest.get(seen[place + 1], 0))
    z = z.copy()
    for token, length in longest.items():
        if length >= rule.allowed:
            z[token] -= min(MOST, rule.multiplier * rule.base ** (length - rule.allowed))
    return z


def longest_that_matters(rule: DryRule) -> int:
    """A match longer than this costs what one of this length does."""
    if rule.base == 1.0 or rule.multiplier == 0.0:
        return rule.allowed
    more = math.log(MOST / rule.multiplier) / math.log(rule.base)
    return min(rule.allowed + max(0, math.ceil(more)), 2**31 - 1)


def penalties(
    matches: SuffixMatches, rule: DryRule, marks: TokenMarks
) -> tuple[IntArray, FloatArray]:
    """The tokens that lose something, each once, and what is added to their logits."""
    lengths, following = matches.lengths, matches.following
    if rule.range:
        first = matches.count - rule.range
        lengths = np.minimum(lengths, matches.places - first + 1)
    enough = lengths >= rule.allowed
    more = lengths[enough] - rule.allowed
    if more.max(initial=0) <= 0x7FFF:
        more = more.astype(np.int16)  # whose stable sort is by radix, linear
    following = following[enough]
    if (more[1:] < more[:-1]).any():  # not so where a text repeats itself to its end
        order = np.argsort(more, kind="stable")
        following, more = following[order], more[order]
    last = marks.last_of_each(following)
    grown = more[last] * math.log(rule.base) + math.log(rule.multiplier)
    lost = np.exp(np.minimum(grown, math.log(MOST)))
    return following[last].astype(np.int64), -lost.astype(np.float32)
