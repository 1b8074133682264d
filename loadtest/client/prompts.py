"""Prompts made at random: token ids, or words where the endpoint wants text."""

from __future__ import annotations

import math
import random

import msgspec

DEFAULT_VOCAB_SIZE = 256
"""Every tokenizer in use has at least this many tokens."""
WORDS = """
    the of and to in is that it was for on are as with they at be this from have or by one had
    not but what all were when we there can an your which their said if do will each about how up
    out them then she many some so these would other into has more her two like him see time could
""".split()  # noqa: SIM905
"""Common words: one token each, with the space before it, in nearly every vocabulary."""


class Prompt(msgspec.Struct, frozen=True):
    """One request to make, apart from what all requests have in common."""

    content: msgspec.Raw
    """JSON: a string, an array of token ids, or (with ``messages``) an array of messages."""
    output_len: int
    """``max_tokens``."""
    input_len: int | None = None
    """Tokens, where they are known before the server counts them."""
    is_messages: bool = False
    is_ids: bool = False


class RandomShape(msgspec.Struct, frozen=True):
    """Lengths of random prompts, in tokens (of text: in words)."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    """Lengths are drawn evenly from ``len * (1 - ratio)`` to ``len * (1 + ratio)``."""
    prefix_len: int = 0
    """Tokens at the beginning that prompts share; they come on top of ``input_len``."""
    prefix_count: int = 1
    """Different prefixes, which the prompts take in turn."""

    def length(self, draw: random.Random, mean: int) -> int:
        low = max(1, math.floor(mean * (1 - self.range_ratio)))
        high = max(low, math.ceil(mean * (1 + self.range_ratio)))
        return draw.randint(low, high)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and answer together."""
        factor = 1 + self.range_ratio
        outputs = math.ceil(self.output_len * factor)
        return self.prefix_len + math.ceil(self.input_len * factor) + outputs


def random_prompts(
    count: int, shape: RandomShape, seed: int | str, *, vocab_size: int, as_text: bool
) -> list[Prompt]:
    """``count`` prompts; the same for the same arguments.

    Token ids are drawn evenly from all below ``vocab_size``.
    """
    draw = random.Random(f"prompts {seed}")
    pool = WORDS if as_text else range(vocab_size)
    prefixes = [draw.choices(pool, k=shape.prefix_len) for _ in range(shape.prefix_count)]
    made = []
    for number in range(count):
        own = draw.choices(pool, k=shape.length(draw, shape.input_len))
        parts = prefixes[number % len(prefixes)] + own
        content = " ".join(map(str, parts)) if as_text else parts
        made.append(
            Prompt(
                msgspec.Raw(msgspec.json.encode(content)),
                output_len=shape.length(draw, shape.output_len),
                input_len=len(parts),
                is_ids=not as_text,
            )
        )
    return made
