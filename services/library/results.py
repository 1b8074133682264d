"""What has come of a request, as ``LLM``, ``AsyncLLM`` and ``LLMEngine`` hand it out."""

from __future__ import annotations

from array import array
from typing import Literal

from penstock.client.answers import Answer, RequestProgress
from penstock.protocol.logprobs import TokenLogprobs, unpack
from penstock.protocol.wire.messages.requests import TOKEN_BYTES
from penstock.protocol.wire.messages.tokens import RowDetails
from penstock.services.library.member import Submission
from penstock.services.library.outputs import (
    CompletionOutput,
    Logprob,
    RequestError,
    RequestOutput,
    RequestRefused,
    ToolCall,
)
from penstock.services.library.prompts import PlainPrompt

OutputKind = Literal["cumulative", "delta", "final"]
"""All that has come so far, each time; what has come since the last time; all, once, at the end."""
_NO_ROOM = (429, 503)


def wants_retry(progress: RequestProgress) -> bool:
    """Whether it was refused for want of room (429: of the room of one user) before anything of it
    began."""
    rejected = progress.rejected
    return rejected is not None and rejected.status in _NO_ROOM and bool(progress.unaccepted)


def check(whose: str, progress: RequestProgress, request_id: str = "") -> None:
    """Raises ``RequestRefused`` or ``RequestError`` for a request that ended with an error.
    whose: as the message names it."""
    error: RequestError | RequestRefused
    if (rejected := progress.rejected) is not None:
        kind = RequestRefused if rejected.status < 500 else RequestError
        error = kind(f"{whose}: {rejected.message}")
    elif progress.failed is not None:
        error = RequestError(f"{whose}: {progress.failed.message}")
    else:
        return
    error.request_id = request_id
    raise error


def output_of(
    given: PlainPrompt | None, submission: Submission, kind: OutputKind, *, aborted: bool = False
) -> RequestOutput:
    """What is handed out now. given: the prompt. aborted: what has not ended is given up."""
    if kind == "delta":
        return _new_output(given, submission, aborted=aborted)
    choices = []
    for number, answer in enumerate(submission.answers):
        answer.join()
        known = submission.logprobs[number]
        known += _logprobs(answer.details[submission.read_details[number] :])
        submission.read_details[number] = len(answer.details)
        ids = _ids(submission, number, 0)
        choices.append(_choice(number, answer, ids, known.copy(), {}, aborted=aborted))
    return _output(given, submission, choices, finished=aborted or submission.done)


def aborted_output(given: PlainPrompt | None, name: str, choices: int) -> RequestOutput:
    """Of a request that was given up before it was sent."""
    empty = [CompletionOutput(number, "", [], "abort", None) for number in range(choices)]
    prompt = given if isinstance(given, str) else None
    return RequestOutput(prompt, [], empty, 0, None, name, True)


def _new_output(
    given: PlainPrompt | None, submission: Submission, *, aborted: bool
) -> RequestOutput:
    """What has come since the last call, of the choices of which anything has."""
    choices = []
    _read_prompt(submission)
    for number, answer in enumerate(submission.answers):
        ids = _ids(submission, number, submission.taken[number])
        ends = answer.end is not None or (aborted and not answer.has_ended)
        if ids or answer.content or ends:
            submission.taken[number] += len(ids)
            opened = submission.opened[number]
            logprobs = _logprobs(answer.details)
            choices.append(_choice(number, answer, ids, logprobs, opened, aborted=aborted))
            answer.clear()
    return _output(given, submission, choices, finished=aborted or submission.done)


def _ids(submission: Submission, number: int, first: int) -> list[int]:
    request = submission.request
    if request is None:
        raise RequestError("the request was never submitted")
    return list(array("i", bytes(request.choices[number].output[first * TOKEN_BYTES :])))


def _choice(
    number: int,
    answer: Answer,
    ids: list[int],
    logprobs: list[dict[int, Logprob]],
    opened: dict[int, tuple[str, str]],
    *,
    aborted: bool,
) -> CompletionOutput:
    """opened: (id, name) of calls that were handed out before."""
    reason, stop = (None, None) if answer.end is None else answer.finish
    return CompletionOutput(
        number,
        answer.text,
        ids,
        "abort" if aborted and not answer.has_ended else reason,
        stop,
        logprobs or None,
        answer.reasoning,
        [ToolCall(*call) for call in answer.calls(opened)],
    )


def _output(
    given: PlainPrompt | None,
    submission: Submission,
    choices: list[CompletionOutput],
    *,
    finished: bool,
) -> RequestOutput:
    _read_prompt(submission)
    request = submission.request
    if request is not None and not submission.prompt_ids:
        submission.prompt_ids = _prompt_ids(given, request.prompt)
    return RequestOutput(
        given if isinstance(given, str) else None,
        submission.prompt_ids,
        choices,
        submission.progress.usage.cached,
        submission.prompt_logprobs,
        submission.name,
        finished,
    )


def _prompt_ids(given: PlainPrompt | None, computed: bytes) -> list[int]:
    """The ids of the prompt that was computed: those given, unless the server cut it or they are
    numbers of another kind, numpy's say."""
    if (
        isinstance(given, list)
        and len(given) * TOKEN_BYTES == len(computed)
        and type(given[0]) is int
    ):
        return given.copy()
    return list(array("i", computed))


def _by_id(token: TokenLogprobs) -> dict[int, Logprob]:
    return {
        one.token: Logprob(one.logprob, one.rank, one.piece.decode("utf-8", "replace"))
        for one in (*token.top, token.own)
    }


def _logprobs(details: list[RowDetails]) -> list[dict[int, Logprob]]:
    rows = [row.tokens for row in details if row.tokens is not None]
    return [_by_id(token) for named in rows for token in unpack(named)]


def _read_prompt(submission: Submission) -> None:
    """Take the logprobs of the prompt, which come once, with the first rows."""
    if submission.wants_prompt_logprobs and submission.prompt_logprobs is None:
        for row in submission.answers[0].details:
            if row.prompt is not None:
                named = (_by_id(token) for token in unpack(row.prompt, 1))
                submission.prompt_logprobs = [None, *named]
