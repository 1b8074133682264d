"""What the library hands out. Field names are those that vLLM's users know."""

from __future__ import annotations

import msgspec


class Logprob(msgspec.Struct, frozen=True):
    """The log probability of one token at one place."""

    logprob: float
    rank: int
    """1 is the likeliest."""
    decoded_token: str


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool that the model asks for."""

    id: str
    name: str
    arguments: str
    """JSON."""


class CompletionOutput(msgspec.Struct, frozen=True):
    """One choice."""

    index: int
    text: str
    token_ids: list[int]
    """The tokens up to the end; a stop token or the tokens of a stop string are the last ones."""
    finish_reason: str | None
    """``stop``, ``length`` or, of a request that the caller gave up, ``abort``; ``None`` while it
    runs."""
    stop_reason: int | str | None
    """What was found of ``stop`` and ``stop_token_ids``; ``None`` for the model's end token."""
    logprobs: list[dict[int, Logprob]] | None = None
    """By token id, for each token: itself and the likeliest ones; with ``logprobs`` alone."""
    reasoning: str = ""
    """What was thought before the text; of a chat, where the model's way to write it is known."""
    tool_calls: list[ToolCall] = []


class RequestOutput(msgspec.Struct, frozen=True):
    """One prompt with its ``n`` choices, in order."""

    prompt: str | None
    """``None`` where token ids or messages were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """As ``CompletionOutput.logprobs``, with ``prompt_logprobs`` alone; the first is ``None``."""
    request_id: str = ""
    """As the caller named it; its number, where ``LLM`` was asked."""
    finished: bool = True
    """Nothing more will come of it."""


class EmbeddingOutput(msgspec.Struct, frozen=True):
    """The vector of a text."""

    embedding: list[float]


class ScoringOutput(msgspec.Struct, frozen=True):
    """The score of a pair, the higher the better."""

    score: float


class ClassificationOutput(msgspec.Struct, frozen=True):
    """The labels of a text."""

    label: str
    """The likeliest one."""
    probs: list[float]
    """Of all labels, in the order of the model's folder."""


class EmbeddingRequestOutput(msgspec.Struct, frozen=True):
    """What came of one prompt of ``embed``."""

    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    request_id: str = ""


class ScoringRequestOutput(msgspec.Struct, frozen=True):
    """What came of one pair of ``score``."""

    outputs: ScoringOutput
    prompt_token_ids: list[int]
    """Of both texts together."""
    request_id: str = ""


class ClassificationRequestOutput(msgspec.Struct, frozen=True):
    """What came of one prompt of ``classify``."""

    outputs: ClassificationOutput
    prompt_token_ids: list[int]
    request_id: str = ""


class RequestError(RuntimeError):
    """A prompt could not be served. Names it and the cause."""

    request_id: str = ""
    """As the caller named it, with ``AsyncLLM`` and ``LLMEngine``."""


class RequestRefused(ValueError):
    """The server refuses a prompt or its parameters. Names it and the cause."""

    request_id: str = ""
    """As the caller named it, with ``AsyncLLM`` and ``LLMEngine``."""
