"""Requests for the offline measurements: token ids at random, in the order of the draws that
published figures are based on."""

from __future__ import annotations

import random

import msgspec

LARGEST_ID = 10_000
Range = tuple[int, int]


class OfflineRequests(msgspec.Struct, frozen=True):
    prompts: list[list[int]]
    output_lens: list[int]


def draw_requests(
    count: int, inputs: Range, outputs: Range, seed: int, prefix: int = 0
) -> OfflineRequests:
    """First for each prompt its length and its ids (0 to 10,000), then all output lengths, then
    ``prefix`` ids that stand before every prompt.

    The order is that of nano-vllm's ``bench.py``: 256 requests of 100 to 1,024 in and out with
    seed 0 have 142,827 tokens in and 133,966 out.
    """
    draw = random.Random(seed)
    prompts = []
    for _ in range(count):
        length = draw.randint(*inputs)
        prompts.append([draw.randint(0, LARGEST_ID) for _ in range(length)])
    output_lens = [draw.randint(*outputs) for _ in range(count)]
    common = [draw.randint(0, LARGEST_ID) for _ in range(prefix)]
    return OfflineRequests([common + prompt for prompt in prompts], output_lens)


def moved(prompts: list[list[int]], by: int, vocab_size: int) -> list[list[int]]:
    """Prompts of the same lengths and other ids below ``vocab_size``: none is in a prefix cache
    that has seen them moved by another number."""
    return [[(token + by) % vocab_size for token in prompt] for prompt in prompts]
