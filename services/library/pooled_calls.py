"""``embed``, ``score`` and ``classify`` of ``LLM`` and of ``AsyncLLM``."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Unpack

from penstock.client.batches import batch_end
from penstock.protocol.tasks import CLASSIFY, EMBED, SCORE
from penstock.protocol.wire.messages.requests import Prompt, Work
from penstock.services.library.member import MAX_OPEN, Submission
from penstock.services.library.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    ScoringRequestOutput,
)
from penstock.services.library.pooled_work import (
    InputType,
    Options,
    PooledPrompt,
    classification_of,
    each_of,
    embedding_of,
    options_of,
    pairs_of,
    pooled_work,
    score_of,
)
from penstock.services.library.prompts import (
    PromptLike,
    list_of_prompts,
    messages_of,
    one_prompt,
)
from penstock.services.library.requests import Terms, all_asked, asked_of


class PooledCalls(ABC):
    """Each call takes one or a list, and returns results in their order.

    ``prompt_name``: one of the prompts in the model's folder. ``truncate_prompt_tokens``: tokens to
    keep of each prompt, -1: as many as the model takes. The other parameters, and what is raised,
    are as in ``LLM.generate``; a model that does not do the task is a ``RequestRefused``.
    """

    @abstractmethod
    def _finished(
        self, works: Sequence[Work], progress: bool | None, max_open: int
    ) -> list[Submission]:
        """What came of each of them."""

    @abstractmethod
    def _labels(self) -> list[str]:
        """What the scores of the task ``classify`` stand for."""

    def _done(
        self,
        method: str,
        prompts: list[Prompt],
        options: Options,
        priority: int | Sequence[int],
        terms: Terms,
        progress: bool | None,
        max_open: int,
    ) -> list[PooledPrompt]:
        asked, works, first = all_asked(method, terms, priority, len(prompts)), list[Work](), 0
        for one, alike in itertools.groupby(asked):
            last = first + len(list(alike))
            while first < last:
                end = batch_end(prompts, first, min(last, first + max(max_open, 1)))
                works.append(pooled_work(method, prompts[first:end], options, one))
                first = end
        done = self._finished(works, progress, max_open)
        return [prompt for submission in done for prompt in each_of(submission)]

    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        input_type: InputType | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int | Sequence[int] = 0,
        progress: bool | None = None,
        max_concurrency: int = MAX_OPEN,
        **terms: Unpack[Terms],
    ) -> list[EmbeddingRequestOutput]:
        """A vector of each text, or of token ids.

        ``dimensions``: the first numbers alone. ``normalize``: whether vectors have length 1.
        ``input_type``: ``query`` or ``document``, for models with a prompt for each.
        """
        options = options_of(
            dimensions=dimensions,
            normalize=normalize,
            input_type=input_type,
            prompt_name=prompt_name,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        ready = list(messages_of(list_of_prompts(prompts)))
        done = self._done(EMBED, ready, options, priority, terms, progress, max_concurrency)
        return [embedding_of(one) for one in done]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        use_activation: bool | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int | Sequence[int] = 0,
        progress: bool | None = None,
        max_concurrency: int = MAX_OPEN,
        **terms: Unpack[Terms],
    ) -> list[ScoringRequestOutput]:
        """How well the texts of each pair fit together: ``text_1`` beside each of ``text_2``, or
        each of it beside its own. ``use_activation``: false gives the logits."""
        options = options_of(
            use_activation=use_activation,
            prompt_name=prompt_name,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        ready = pairs_of(text_1, text_2)
        done = self._done(SCORE, ready, options, priority, terms, progress, max_concurrency)
        return [score_of(one) for one in done]

    def classify(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        use_activation: bool | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int | Sequence[int] = 0,
        progress: bool | None = None,
        max_concurrency: int = MAX_OPEN,
        **terms: Unpack[Terms],
    ) -> list[ClassificationRequestOutput]:
        """The likeliest label of each text, and the shares of all. ``use_activation``: false gives
        the logits."""
        options = options_of(
            use_activation=use_activation,
            prompt_name=prompt_name,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        ready = list(messages_of(list_of_prompts(prompts)))
        done = self._done(CLASSIFY, ready, options, priority, terms, progress, max_concurrency)
        return [classification_of(one, self._labels()) for one in done]


class AsyncPooledCalls(ABC):
    """Each call takes one text or pair; many run at once with ``asyncio.gather``. Parameters are
    those of ``LLM``. A task that is cancelled cancels its request."""

    @abstractmethod
    async def _whole(self, work: Work, request_id: str) -> Submission:
        """What came of it, once it has ended."""

    @abstractmethod
    async def _labels(self) -> list[str]:
        """What the scores of the task ``classify`` stand for."""

    async def embed(
        self,
        prompt: PromptLike,
        request_id: str = "",
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        input_type: InputType | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        **terms: Unpack[Terms],
    ) -> EmbeddingRequestOutput:
        """A vector of a text, or of token ids."""
        options = options_of(
            dimensions=dimensions,
            normalize=normalize,
            input_type=input_type,
            prompt_name=prompt_name,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        asked = asked_of("embed", terms, priority)
        work = pooled_work(EMBED, [one_prompt(prompt)[1]], options, asked)
        (done,) = each_of(await self._whole(work, request_id))
        return embedding_of(done)

    async def score(
        self,
        text_1: str,
        text_2: str,
        request_id: str = "",
        *,
        use_activation: bool | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        **terms: Unpack[Terms],
    ) -> ScoringRequestOutput:
        """How well two texts fit together."""
        options = options_of(
            use_activation=use_activation,
            prompt_name=prompt_name,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        asked, pairs = asked_of("score", terms, priority), pairs_of(text_1, text_2)
        if len(pairs) != 1:
            raise ValueError(f"{len(pairs)} pairs were given; one request has one")
        work = pooled_work(SCORE, pairs, options, asked)
        (done,) = each_of(await self._whole(work, request_id))
        return score_of(done)

    async def classify(
        self,
        prompt: PromptLike,
        request_id: str = "",
        *,
        use_activation: bool | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        **terms: Unpack[Terms],
    ) -> ClassificationRequestOutput:
        """The likeliest label of a text, and the shares of all."""
        options = options_of(
            use_activation=use_activation,
            prompt_name=prompt_name,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        asked = asked_of("classify", terms, priority)
        work = pooled_work(CLASSIFY, [one_prompt(prompt)[1]], options, asked)
        (done,) = each_of(await self._whole(work, request_id))
        return classification_of(done, await self._labels())
