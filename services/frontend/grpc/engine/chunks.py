"""Messages of what has come of an answer, for a gateway."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.client.answers import Answer
from penstock.client.meters import Usage
from penstock.protocol.grpc.engine import vllm_engine_pb2 as pb
from penstock.protocol.logprobs import NamedLogprobs, TokenLogprobs, unpack
from penstock.services.frontend.dialects.token_ids import listed
from penstock.services.frontend.parse import GenerateRequest


class Chunks:
    """Makes the messages of one answer: of each choice those with new tokens, where it is a stream,
    and one at its end."""

    def __init__(self, request: GenerateRequest) -> None:
        self._is_stream = request.stream
        self._wants_logprobs = request.params.logprobs is not None

    def messages(
        self, answers: Iterable[tuple[int, Answer]], usage: Usage, *, ended: bool
    ) -> Sequence[pb.GenerateResponse]:
        found: list[pb.GenerateResponse] = []
        for index, answer in answers:
            ids = listed(answer.ids)
            fields: dict[str, Any] = {
                "index": index,
                "prompt_tokens": usage.prompt,
                "cached_tokens": usage.cached,
                "completion_tokens": len(ids),
                **self._logprobs(answer),
            }
            if self._is_stream and ids:
                chunk = pb.GenerateStreamChunk(token_ids=ids, **fields)
                found.append(pb.GenerateResponse(chunk=chunk))
            if answer.end is not None:
                found.append(_complete(ids, answer, fields))
        return found

    def _logprobs(self, answer: Answer) -> dict[str, Any]:
        found: dict[str, Any] = {}
        tokens = [one.tokens for one in answer.details if one.tokens is not None]
        if self._wants_logprobs and tokens:
            entries = [entry for named in tokens for entry in unpack(named)]
            found["output_logprobs"] = pb.OutputLogProbs(
                token_logprobs=[one.own.logprob for one in entries],
                token_ids=[one.own.token for one in entries],
                top_logprobs=[_top(one) for one in entries],
            )
        for details in answer.details:
            if details.prompt is not None:
                found["input_logprobs"] = _of_prompt(details.prompt, listed([answer.prompt or b""]))
        return found


def _complete(ids: list[int], answer: Answer, fields: dict[str, Any]) -> pb.GenerateResponse:
    reason, stop = answer.finish
    matched: dict[str, Any] = {}
    if stop is not None:
        matched["matched_stop_str" if isinstance(stop, str) else "matched_token_id"] = stop
    complete = pb.GenerateComplete(output_ids=ids, finish_reason=reason, **fields, **matched)
    return pb.GenerateResponse(complete=complete)


def _of_prompt(named: NamedLogprobs, ids: list[int]) -> pb.InputLogProbs:
    """The first token has no logprob."""
    entries = list(unpack(named, skip=1))
    values = [pb.InputTokenLogProb(value=one.own.logprob) for one in entries]
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(), *values],
        token_ids=[*ids[:1], *(one.own.token for one in entries)],
        top_logprobs=[pb.TopLogProbs(), *map(_top, entries)],
    )


def _top(entry: TokenLogprobs) -> pb.TopLogProbs:
    return pb.TopLogProbs(
        values=[one.logprob for one in entry.top], token_ids=[one.token for one in entry.top]
    )
