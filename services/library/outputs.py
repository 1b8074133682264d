"""What ``LLM.generate`` returns. Field names are those that vLLM's users know."""

from __future__ import annotations

import msgspec


class CompletionOutput(msgspec.Struct, frozen=True):
    """One choice."""

    index: int
    text: str
    token_ids: list[int]
    """The tokens up to the end; a stop token or the tokens of a stop string are the last ones."""
    finish_reason: str
    """``stop`` or ``length``."""
    stop_reason: int | str | None
    """The stop token or stop string that was found."""


class RequestOutput(msgspec.Struct, frozen=True):
    """One prompt with its ``n`` choices, in order."""

    prompt: str | None
    """``None`` where token ids or messages were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""


class RequestError(RuntimeError):
    """A prompt could not be served. Names its position in the list and the cause."""
