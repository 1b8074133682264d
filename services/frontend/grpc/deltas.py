"""Messages of what has come of an answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from penstock.client.answers import FINISH_REASONS, Answer
from penstock.client.meters import Usage
from penstock.protocol.grpc import penstock_pb2 as pb
from penstock.protocol.logprobs import Logprob, NamedLogprobs, unpack
from penstock.protocol.wire.messages.tokens import (
    End,
    Event,
    Reasoning,
    RowDetails,
    Text,
    ToolArguments,
    ToolCallOpened,
)
from penstock.services.frontend.dialects.token_ids import listed
from penstock.services.frontend.parse import GenerateRequest

Response = TypeVar("Response", bound=pb.GenerateResponse | pb.ChatResponse)
_REASONS = {"stop": pb.Finish.STOP, "length": pb.Finish.LENGTH}


class Messages(Generic[Response]):
    """Makes the messages of one answer, of one kind."""

    def __init__(self, kind: type[Response], request: GenerateRequest, answer_id: str) -> None:
        self._kind = kind
        self._request = request
        self._id = answer_id
        self._is_first = True
        self._called: set[int] = set()
        """Choices that have called tools."""

    def messages(
        self, answers: Iterable[tuple[int, Answer]], usage: Usage, *, ended: bool
    ) -> Sequence[Response]:
        """One with what has come of some choices, by their numbers."""
        found = self._kind()
        if self._is_first:
            self._is_first = False
            found.id, found.model = self._id, self._request.model
        for index, answer in answers:
            found.deltas.extend(self._deltas(index, answer))
            if answer.prompt is not None and not found.prompt_token_ids:
                found.prompt_token_ids.extend(listed([answer.prompt]))
            for details in answer.details:
                if details.prompt is not None:
                    found.prompt_logprobs.extend(_of_prompt(details.prompt))
        if ended:
            found.usage.CopyFrom(usage_of(usage))
        return [found]

    def _deltas(self, index: int, answer: Answer) -> list[pb.Delta]:
        content = answer.content
        plain = answer.end is None and not answer.details and not answer.ids
        if plain and all(type(part) is str for part in content):  # as nearly all of a stream
            return [pb.Delta(index=index, text="".join(content))] if content else []  # type: ignore[arg-type]
        deltas = [self._delta(index, event) for event in answer.events()]
        logprobs = _of_tokens(answer.details) if self._request.params.logprobs is not None else []
        if not deltas and (answer.end is not None or answer.ids or logprobs):
            deltas = [pb.Delta(index=index)]
        if answer.ids:
            deltas[0].token_ids.extend(listed(answer.ids))
        if logprobs:
            deltas[0].logprobs.extend(logprobs)
        if answer.end is not None:
            deltas[-1].finish.CopyFrom(self._finish(index, answer.end))
        return deltas

    def _delta(self, index: int, event: Event) -> pb.Delta:
        match event:
            case Text(text):
                return pb.Delta(index=index, text=text)
            case Reasoning(text):
                return pb.Delta(index=index, reasoning=text)
            case ToolCallOpened(number, name_of_call, name):
                self._called.add(index)
                call = pb.ToolCallDelta(index=number, id=name_of_call, name=name)
                return pb.Delta(index=index, tool_calls=[call])
            case ToolArguments(number, text):
                call = pb.ToolCallDelta(index=number, arguments=text)
                return pb.Delta(index=index, tool_calls=[call])
        raise TypeError(f"{type(event).__name__} has no place in an answer of text")

    def _finish(self, index: int, end: End) -> pb.Finish:
        reason = _REASONS[FINISH_REASONS[end.reason]]
        if reason == pb.Finish.STOP and index in self._called:
            reason = pb.Finish.TOOL_CALLS
        if isinstance(end.stop, str):
            return pb.Finish(reason=reason, stop_string=end.stop)
        return pb.Finish(reason=reason, stop_token_id=end.stop)


def usage_of(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt,
        completion_tokens=usage.completion,
        cached_tokens=usage.cached,
        reasoning_tokens=usage.reasoning,
    )


def _of_tokens(details: Sequence[RowDetails]) -> list[pb.TokenLogprob]:
    return [
        _logprob(entry.own, entry.top)
        for row in details
        if row.tokens is not None
        for entry in unpack(row.tokens)
    ]


def _of_prompt(named: NamedLogprobs) -> list[pb.TokenLogprob]:
    """The first token of a prompt has no logprob."""
    first = [pb.TokenLogprob(token=named.pieces[0])] if named.pieces else []
    return first + [_logprob(entry.own, entry.top) for entry in unpack(named, skip=1)]


def _logprob(own: Logprob, top: Sequence[Logprob] = ()) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token_id=own.token,
        token=own.piece,
        logprob=own.logprob,
        top=[_logprob(one) for one in top],
    )
