"""Logprobs in the JSON of the two endpoints.

The chat endpoint lists tokens with their bytes, /v1/completions has columns and keys the likeliest
tokens by their text (https://platform.openai.com/docs/api-reference). A token that is no valid
UTF-8 by itself is written ``bytes:\\xe2\\x96`` there, so that different ones stay different.
``prompt_logprobs`` is as vLLM has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from penstock.client.answers import Answer
from penstock.protocol.logprobs import Logprob, NamedLogprobs, TokenLogprobs, unpack
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.tokens import RowDetails
from penstock.services.frontend.bodies.responses import (
    ChatLogprobsBody,
    ChatTokenLogprob,
    LogprobColumns,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
)

LOWEST = -9999.0
"""JSON has no infinity."""


class ChatLogprobs:
    """The ``logprobs`` member of one choice of a chat completion, for its rows in order."""

    __slots__ = ("_wanted",)

    def __init__(self, params: SamplingParams) -> None:
        self._wanted = params.logprobs is not None

    def member(self, details: Iterable[RowDetails]) -> ChatLogprobsBody | None:
        """``None`` where logprobs are not wanted or none are there."""
        if not self._wanted:
            return None
        rows = (row.tokens for row in details if row.tokens is not None)
        content = [token for tokens in rows for token in chat_tokens(tokens)]
        return ChatLogprobsBody(content=content, refusal=None) if content else None


class CompletionLogprobs:
    """The same of /v1/completions."""

    __slots__ = ("_shift", "_wanted", "_with_prompt")

    def __init__(self, params: SamplingParams, *, shown: bool = True) -> None:
        self._wanted = shown and params.logprobs is not None
        self._with_prompt = params.echo
        self._shift = 0
        """Characters of the echo before the answer."""

    def member(self, details: Iterable[RowDetails]) -> LogprobColumns | None:
        """``None`` where logprobs are not wanted or none are there."""
        if not self._wanted:
            return None
        columns = _CompletionColumns()
        for row in details:
            if self._with_prompt and row.prompt is not None:
                columns.add_first(row.prompt.pieces[0], row.prompt.offsets[0])
                for token, offset in zip(
                    unpack(row.prompt, 1), row.prompt.offsets[1:], strict=True
                ):
                    columns.add(token, offset)
            self._shift += len(row.echo)
            if row.tokens is not None:
                for token, offset in zip(unpack(row.tokens), row.tokens.offsets, strict=True):
                    columns.add(token, self._shift + offset)
        return columns.body() if columns.tokens else None


def likeliest(answers: Sequence[Answer], choices: int, keeps: int) -> list[Answer]:
    """Of each prompt's ``choices`` answers the ``keeps`` with the highest mean logprob of a token,
    the best first; of equal ones those that were asked for first."""
    kept: list[Answer] = []
    for first in range(0, len(answers), choices):
        of_prompt = answers[first : first + choices]
        kept += sorted(of_prompt, key=_mean_logprob, reverse=True)[:keeps]
    return kept


def _mean_logprob(answer: Answer) -> float:
    """Of an answer without tokens the lowest there is."""
    rows = (row.tokens for row in answer.details if row.tokens is not None)
    found = [max(token.own.logprob, LOWEST) for tokens in rows for token in unpack(tokens)]
    return sum(found) / len(found) if found else LOWEST


def prompt_logprobs(details: Iterable[RowDetails]) -> PromptLogprobs | None:
    """One entry for each token of the prompt, ``null`` for the first; ``None``: not asked for."""
    for row in details:
        if row.prompt is not None:
            return [None, *(_by_id(token) for token in unpack(row.prompt, 1))]
    return None


def text_of(piece: bytes) -> str:
    """For people; see ``Logprob.piece`` for what is exact."""
    return piece.decode("utf-8", "replace")


def _key_of(piece: bytes) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _chat_entry(one: Logprob) -> TokenLogprob:
    return TokenLogprob(
        token=text_of(one.piece), logprob=max(one.logprob, LOWEST), bytes=list(one.piece)
    )


def chat_tokens(named: NamedLogprobs) -> Iterator[ChatTokenLogprob]:
    """Tokens as the chat endpoint lists them."""
    return map(_chat_token, unpack(named))


def _chat_token(token: TokenLogprobs) -> ChatTokenLogprob:
    own = token.own
    return ChatTokenLogprob(
        token=text_of(own.piece),
        logprob=max(own.logprob, LOWEST),
        bytes=list(own.piece),
        top_logprobs=[_chat_entry(one) for one in token.top],
    )


def _by_id(token: TokenLogprobs) -> dict[str, PromptLogprob]:
    return {
        str(one.token): PromptLogprob(
            logprob=max(one.logprob, LOWEST), rank=one.rank, decoded_token=text_of(one.piece)
        )
        for one in (*token.top, token.own)
    }


class _CompletionColumns:
    """The columns of a completion's logprobs."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.logprobs: list[float | None] = []
        self.top: list[dict[str, float] | None] = []
        self.offsets: list[int] = []
        self.listed = False

    def add_first(self, piece: bytes, offset: int) -> None:
        """The first token of a prompt: nothing predicts it."""
        self.tokens.append(_key_of(piece))
        self.logprobs.append(None)
        self.top.append(None)
        self.offsets.append(offset)

    def add(self, token: TokenLogprobs, offset: int) -> None:
        self.tokens.append(_key_of(token.own.piece))
        self.logprobs.append(max(token.own.logprob, LOWEST))
        self.offsets.append(offset)
        self.listed |= bool(token.top)
        self.top.append(
            {_key_of(one.piece): max(one.logprob, LOWEST) for one in (*token.top, token.own)}
        )

    def body(self) -> LogprobColumns:
        return LogprobColumns(
            tokens=self.tokens,
            token_logprobs=self.logprobs,
            top_logprobs=self.top if self.listed else None,
            text_offset=self.offsets,
        )
