"""Requests of the library for a vector or scores of each text, and what is handed out for them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from penstock.client.answers import Answer
from penstock.client.batches import as_one
from penstock.client.vectors import likeliest, numbers, scores_of, vector_of
from penstock.protocol.declared import Declared
from penstock.protocol.sampling import MAX_TOKENS, SamplingParams
from penstock.protocol.validation import check_text, read
from penstock.protocol.wire.messages.requests import (
    ChoiceState,
    Pair,
    PoolingParams,
    Prompt,
    Work,
    split_ids,
)
from penstock.services.library.member import Submission
from penstock.services.library.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestError,
    ScoringOutput,
    ScoringRequestOutput,
)
from penstock.services.library.requests import Asked, work_of

InputType = Literal["query", "document"]


class Options(Declared, kw_only=True):
    """What may be said of such a request; ``None``: as the model's folder says."""

    dimensions: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    prompt_name: str | None = None
    input_type: InputType | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None


def options_of(**given: Any) -> Options:
    """Raises ``ValueError``."""
    found: Options = read(given, Options)
    if found.truncate_prompt_tokens == 0:
        raise ValueError("truncate_prompt_tokens is 0; a number from 1 on is allowed, or -1")
    if found.input_type and found.prompt_name:
        raise ValueError(
            f"input_type is {found.input_type!r} and prompt_name is {found.prompt_name!r}; one of "
            "them says which prompt stands ahead of the texts"
        )
    return found


def pooled_work(task: str, prompts: Sequence[Prompt], options: Options, asked: Asked) -> Work:
    """Of one or more prompts. Raises ``ValueError``."""
    keep = options.truncate_prompt_tokens
    keep = MAX_TOKENS if keep == -1 else keep  # a tokenizer keeps what the model takes
    made = work_of(prompts[0], SamplingParams(truncate_prompt_tokens=keep), None, asked)
    pooling = PoolingParams(
        options.dimensions,
        options.normalize,
        options.use_activation,
        options.prompt_name or "",
        options.input_type or "",
    )
    head = msgspec.structs.replace(made.head, task=task, siblings=len(prompts))
    choices = [ChoiceState(number) for number in range(len(prompts))]
    return msgspec.structs.replace(
        made, head=head, prompt=as_one(prompts), choices=choices, pooling=pooling
    )


def pairs_of(text_1: str | Sequence[str], text_2: str | Sequence[str]) -> list[Prompt]:
    """Pairs of a text and each of others, or of as many texts. Raises ``ValueError``."""
    first, second = _texts(text_1, "text_1"), _texts(text_2, "text_2")
    if len(first) not in (1, len(second)):
        raise ValueError(
            f"text_1 holds {len(first)} texts and text_2 {len(second)}; one text is allowed beside "
            "many, or as many in both"
        )
    if len(first) == 1:
        first *= len(second)
    return [Pair(*texts) for texts in zip(first, second, strict=True)]


def _texts(given: Any, name: str) -> list[str]:
    listed = [given] if isinstance(given, str) else given
    if not isinstance(listed, Sequence) or not all(isinstance(one, str) for one in listed):
        raise ValueError(f"{name} must be a text or a list of texts, got {type(given).__name__}")
    check_text(listed, name)
    return list(listed)


class PooledPrompt(NamedTuple):
    """What came of one prompt."""

    answer: Answer
    ids: list[int]
    """The tokens that the model read."""
    name: str
    """Of its request."""


def each_of(done: Submission) -> list[PooledPrompt]:
    """The prompts of a submission, in their order. Of a batch, whose name is a number, the names go
    on from it. Raises ``RequestError`` for what was never sent."""
    if done.request is None:
        raise RequestError("the request was never submitted")
    ids = split_ids(bytes(done.request.prompt), done.request.lengths)
    names = [done.name]
    if len(ids) > 1:
        names = [str(int(done.name) + number) for number in range(len(ids))]
    read = [list(array("i", one)) for one in ids]
    return list(map(PooledPrompt, done.answers, read, names))


def embedding_of(done: PooledPrompt) -> EmbeddingRequestOutput:
    vector = numbers(vector_of(done.answer)).tolist()
    return EmbeddingRequestOutput(EmbeddingOutput(vector), done.ids, done.name)


def score_of(done: PooledPrompt) -> ScoringRequestOutput:
    score = scores_of(done.answer)[0]
    return ScoringRequestOutput(ScoringOutput(score), done.ids, done.name)


def classification_of(done: PooledPrompt, labels: Sequence[str]) -> ClassificationRequestOutput:
    """labels: the model's, in the order of its scores."""
    shares = scores_of(done.answer).tolist()
    found = ClassificationOutput(likeliest(shares, labels), shares)
    return ClassificationRequestOutput(found, done.ids, done.name)
