"""How the inputs of a request become batches, each of which travels as one message.

A batch runs in one engine, so its bounds also say how far a request spreads over several: what
costs an engine more than it costs to carry goes alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.client.admission import prompt_tokens
from penstock.protocol.wire.messages.requests import Chat, Inputs, Prompt

BATCH_INPUTS = 16
"""Inputs of a batch, at most. What a message costs counts little among so many, and 64 texts of one
client keep four tokenizers busy."""
BATCH_TOKENS = 2048
"""Tokens of all of them, at most, as they are counted before they are encoded; a longer input is a
batch of its own."""


def batch_end(prompts: Sequence[Prompt], first: int, last: int) -> int:
    """Where the batch that begins with prompt ``first`` ends: at ``last`` at most, which is
    greater."""
    last = min(last, first + BATCH_INPUTS)
    end, tokens = first + 1, prompt_tokens(prompts[first])
    while end < last and (tokens := tokens + prompt_tokens(prompts[end])) <= BATCH_TOKENS:
        end += 1
    return end


def as_one(prompts: Sequence[Prompt]) -> Prompt | Inputs:
    """What a request for one or more prompts carries. Raises ``TypeError`` for several chats."""
    if len(prompts) == 1:
        return prompts[0]
    inputs = [prompt for prompt in prompts if not isinstance(prompt, Chat)]
    if len(inputs) < len(prompts):
        raise TypeError("a chat is no part of a batch")
    return Inputs(inputs)
