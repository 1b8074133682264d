"""``beam_search`` of ``LLM``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Unpack

from penstock.client.tokens import ids_of
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.tasks import DETOKENIZE, TOKENIZE
from penstock.protocol.wire.messages.requests import Prompt, Work
from penstock.services.library.beam_search import (
    BeamSearchOutput,
    BeamSearchParams,
    PromptSearch,
    check_lengths,
    checked_params,
    likeliest,
    sequences,
    step_params,
)
from penstock.services.library.member import MAX_OPEN, Submission
from penstock.services.library.outputs import RequestOutput
from penstock.services.library.progress import ProgressBar
from penstock.services.library.prompts import (
    PlainPrompt,
    PromptLike,
    list_of_prompts,
    messages_of,
)
from penstock.services.library.requests import Asked, Terms, all_asked, task_work, work_of


class BeamCalls(ABC):
    @abstractmethod
    def _run(
        self,
        given: Sequence[PlainPrompt | None],
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        asked: Sequence[Asked],
        progress: bool | None,
        max_open: int,
    ) -> list[RequestOutput]:
        """Complete each of the prompts."""

    @abstractmethod
    def _finished(
        self, works: Sequence[Work], progress: bool | None, max_open: int
    ) -> list[Submission]:
        """What came of each of them."""

    @abstractmethod
    def _longest(self) -> int:
        """Tokens of a sequence, at most."""

    @abstractmethod
    def _end_tokens(self) -> list[int]:
        """Those of the model."""

    def beam_search(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: BeamSearchParams,
        *,
        priority: int | Sequence[int] = 0,
        progress: bool | None = None,
        max_concurrency: int = MAX_OPEN,
        **terms: Unpack[Terms],
    ) -> list[BeamSearchOutput]:
        """The likeliest answers to prompts as a whole, ``params.beam_width`` to each, those to one
        prompt ranked (``penstock.services.library.beam_search``). All prompts are searched beside
        each other; a step of a search is a request for each of its beams.

        The rest is as in ``generate``; ``progress`` counts prompts. ``deadline_s`` is that of each
        step. Raises ``ValueError`` also where ``max_tokens`` do not fit behind a prompt.
        """
        listed, checked = list_of_prompts(prompts), checked_params(params)
        asked = all_asked("beam_search", terms, priority, len(listed))
        ids = self._prompt_ids(listed, asked, max_concurrency)
        check_lengths(ids, checked, self._longest())
        ends = frozenset(self._end_tokens())
        searches = [PromptSearch(prompt, checked, ends) for prompt in ids]
        with ProgressBar(len(searches), progress) as bar:
            while any(not search.done for search in searches):
                self._step(searches, asked, step_params(checked), max_concurrency)
                for search in searches:
                    if search.done and not search.told:
                        search.told = True
                        written = sum(len(beam.tokens) for beam in search.finished)
                        bar.finished(1, len(search.prompt), written)
        answers = [list(beam.tokens) for search in searches for beam in search.finished]
        texts = iter(self._texts(answers, max_concurrency))
        return [
            BeamSearchOutput(
                given if isinstance(given, str) else None,
                search.prompt,
                sequences(
                    search.finished,
                    [next(texts) for _ in search.finished],
                    checked.length_penalty,
                ),
            )
            for given, search in zip(listed, searches, strict=True)
        ]

    def _step(
        self,
        searches: Sequence[PromptSearch],
        asked: Sequence[Asked],
        params: SamplingParams,
        max_open: int,
    ) -> None:
        """Extend the beams of all searches by a token."""
        rows = [
            (tokens, terms)
            for search, terms in zip(searches, asked, strict=True)
            for tokens in search.prompts()
        ]
        given = [tokens for tokens, _ in rows]
        terms_of_rows = [terms for _, terms in rows]
        outputs = iter(self._run(given, messages_of(given), params, terms_of_rows, False, max_open))
        for search in searches:
            if not search.done:
                search.advance([likeliest(next(outputs)) for _ in search.running])

    def _prompt_ids(
        self, prompts: Sequence[PlainPrompt], asked: Sequence[Asked], max_open: int
    ) -> list[list[int]]:
        """Of each prompt the tokens that the model would be given."""
        works = [
            task_work(TOKENIZE, work_of(prompt, SamplingParams(), None, one))
            for prompt, one in zip(messages_of(prompts), asked, strict=True)
        ]
        done = self._finished(works, False, max_open)
        return [ids_of(submission.answers[0]) for submission in done]

    def _texts(self, answers: Sequence[list[int]], max_open: int) -> list[str]:
        """What the tokens of answers say."""
        works = [
            task_work(DETOKENIZE, work_of(prompt, SamplingParams()))
            for prompt in messages_of(answers)
        ]
        return [one.answers[0].text for one in self._finished(works, False, max_open)]
