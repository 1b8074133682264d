"""What ``LLM.beam_search`` takes and gives; ``penstock.client.beam_search`` has the rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_type_hints

import msgspec

from penstock.client.beam_search import (
    MAX_BEAM_WIDTH,
    Beam,
    BeamSearch,
    BeamSearchParams,
    step_params,
)
from penstock.protocol.validation import read
from penstock.services.library.outputs import Logprob, RequestOutput

__all__ = [
    "MAX_BEAM_WIDTH",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "PromptSearch",
    "check_lengths",
    "checked_params",
    "likeliest",
    "sequences",
    "step_params",
]


class PromptSearch(BeamSearch[Logprob]):
    """The search of one prompt, with its tokens."""

    def __init__(self, prompt: list[int], params: BeamSearchParams, ends: frozenset[int]) -> None:
        super().__init__(params, ends)
        self.prompt = prompt
        self.told = False
        """Whether its end was shown."""

    def prompts(self) -> list[list[int]]:
        """What the model is to be asked for one more token of, beam by beam."""
        return [[*self.prompt, *beam.tokens] for beam in self.running]


class BeamSearchSequence(msgspec.Struct, frozen=True):
    """One answer."""

    token_ids: list[int]
    """Of the answer, an end token included."""
    text: str
    cum_logprob: float
    """The sum of its tokens' log probabilities."""
    score: float
    """By which answers are ranked."""
    finish_reason: str
    """``stop`` or ``length``."""
    logprobs: list[Logprob]
    """Of each of its tokens."""


class BeamSearchOutput(msgspec.Struct, frozen=True):
    """One prompt with its answers, the likeliest first."""

    prompt: str | None
    """``None`` where token ids were given."""
    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence]


def sequences(
    beams: Sequence[Beam[Logprob]], texts: Sequence[str], length_penalty: float
) -> list[BeamSearchSequence]:
    """The answers that beams have become. texts: of each."""
    return [
        BeamSearchSequence(
            list(beam.tokens),
            text,
            beam.cum_logprob,
            beam.score(length_penalty),
            "stop" if beam.ended else "length",
            list(beam.logprobs),
        )
        for beam, text in zip(beams, texts, strict=True)
    ]


def checked_params(params: BeamSearchParams) -> BeamSearchParams:
    """Raises ``ValueError`` for a value out of its range."""
    try:
        return msgspec.convert(msgspec.to_builtins(params), BeamSearchParams)
    except msgspec.ValidationError:
        for name, declared in get_type_hints(BeamSearchParams, include_extras=True).items():
            read(getattr(params, name), declared, name)
        raise


def check_lengths(prompts: Sequence[list[int]], params: BeamSearchParams, longest: int) -> None:
    """Raises ``ValueError`` for a prompt behind which the answers do not fit. longest: tokens of a
    sequence."""
    for number, prompt in enumerate(prompts):
        if len(prompt) + params.max_tokens > longest:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens; with max_tokens {params.max_tokens} "
                f"that is more than the {longest} tokens of this model (max_model_len): shorten "
                "the prompt or ask for fewer tokens"
            )


def likeliest(output: RequestOutput) -> dict[int, Logprob]:
    """The next tokens that a step has found for a beam, by their ids."""
    found = output.outputs[0].logprobs
    if found is None:
        raise ValueError("a step of a beam came without logprobs")
    return found[0]
