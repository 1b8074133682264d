"""Beam search: the answers of a prompt that are likeliest as a whole.

Each step extends the ``beam_width`` running beams by every token, keeps the likeliest of what comes
of it, and puts aside those that end. The score of an answer is its log probability divided by its
length to the power of ``length_penalty``, as in Wu et al., "Google's Neural Machine Translation
System" (2016), section 7, with the normalization of transformers' ``generate``, whose answers these
are. Every step of a beam is a request for one token: its prefix is found in the cache, and a
process that dies costs no beam.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Generic, Protocol, TypeVar

import msgspec
from msgspec import Meta

from penstock.protocol.sampling import MAX_LOGPROBS, SamplingParams

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
"""A step needs the logprobs of twice as many tokens: as many may be ends."""


class HasLogprob(Protocol):
    """What is known of a token that may come next."""

    @property
    def logprob(self) -> float:
        """Its log probability."""


Found = TypeVar("Found", bound=HasLogprob)


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to search. Names are those of vLLM, and of transformers' ``generate``."""

    beam_width: Annotated[int, Meta(ge=1, le=MAX_BEAM_WIDTH)]
    """Beams that are followed, and answers that are given."""
    max_tokens: Annotated[int, Meta(ge=1)] = 16
    """Tokens of an answer, at most."""
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] = 1.0
    """Above 0 longer answers are preferred, below 0 shorter ones."""
    early_stopping: bool = False
    """Whether the search ends as soon as ``beam_width`` answers have ended, although one that runs
    could still become likelier than the last of them."""
    ignore_eos: bool = False
    """End tokens are tokens like others: all answers have ``max_tokens``."""


class Beam(msgspec.Struct, Generic[Found], frozen=True):
    """An answer as far as it has come."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[Found, ...] = ()
    cum_logprob: float = 0.0
    ended: bool = False

    def extended(self, token: int, logprob: Found, *, ended: bool) -> Beam[Found]:
        return Beam(
            (*self.tokens, token),
            (*self.logprobs, logprob),
            self.cum_logprob + logprob.logprob,
            ended,
        )

    def score(self, length_penalty: float) -> float:
        return self.cum_logprob / math.pow(max(1, len(self.tokens)), length_penalty)


class BeamSearch(Generic[Found]):
    """The search of one prompt. Nothing but the rules: who has it asks the model."""

    def __init__(self, params: BeamSearchParams, ends: frozenset[int]) -> None:
        """ends: the model's end tokens."""
        self.running = [Beam[Found]()]
        self.finished: list[Beam[Found]] = []
        """The best ``beam_width`` that have ended, the likeliest first."""
        self._params = params
        self._ends = frozenset() if params.ignore_eos else ends

    @property
    def done(self) -> bool:
        return not self.running

    def advance(self, found: list[Mapping[int, Found]]) -> None:
        """Take a step. found: for each running beam its likeliest next tokens, at least twice the
        width."""
        width = self._params.beam_width
        candidates = [
            beam.extended(token, logprob, ended=token in self._ends)
            for beam, tokens in zip(self.running, found, strict=True)
            for token, logprob in tokens.items()
        ]
        candidates.sort(key=lambda beam: -beam.cum_logprob)
        likeliest = candidates[: 2 * width]
        # An end that is not among the first is no better than beams that would go on.
        self._finish([beam for beam in likeliest[:width] if beam.ended])
        self.running = [beam for beam in likeliest if not beam.ended][:width]
        if self.running and len(self.running[0].tokens) >= self._params.max_tokens:
            self._finish(self.running)
            self.running = []
        elif self._is_decided():
            self.running = []

    def _finish(self, beams: list[Beam[Found]]) -> None:
        penalty = self._params.length_penalty
        ranked = sorted([*self.finished, *beams], key=lambda beam: -beam.score(penalty))
        self.finished = ranked[: self._params.beam_width]

    def _is_decided(self) -> bool:
        """Whether no running beam is expected to become likelier than the last that has ended."""
        if len(self.finished) < self._params.beam_width or not self.running:
            return False
        penalty = self._params.length_penalty
        best = self.running[0].score(penalty)
        return self._params.early_stopping or self.finished[-1].score(penalty) >= best


def step_params(params: BeamSearchParams) -> SamplingParams:
    """What each step of a beam asks for: one token, which end tokens do not end, and the likeliest
    ones with their log probabilities."""
    return SamplingParams(
        temperature=0, max_tokens=1, ignore_eos=True, logprobs=2 * params.beam_width
    )
