"""``LLM``: text from a model in a few lines, with the same processes as a server."""

from __future__ import annotations

import atexit
import itertools
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from penstock.client.answers import RequestProgress
from penstock.protocol.grammar.request import from_structured_outputs
from penstock.protocol.logprobs import TokenLogprobs, unpack
from penstock.protocol.plain_errors import plain_error
from penstock.protocol.sampling import PARAMETERS, SamplingParams
from penstock.protocol.validation import InvalidValue, check_text, read
from penstock.protocol.wire.messages.requests import (
    TOKEN_BYTES,
    ChoiceState,
    OutputFormat,
    Prompt,
    RequestHead,
    Work,
    kind_of,
)
from penstock.protocol.wire.messages.tokens import RowDetails
from penstock.services.library.client import PipelineClient, Submission
from penstock.services.library.outputs import (
    CompletionOutput,
    Logprob,
    RequestError,
    RequestOutput,
    ToolCall,
)
from penstock.services.library.progress import ProgressLine
from penstock.services.library.prompts import (
    Message,
    PromptLike,
    chats_of,
    list_of_prompts,
    messages_of,
    tools_of,
)
from penstock.services.library.server_process import ServerFailed, ServerProcess

MAX_OPEN = 1000
"""Prompts in the pipeline at once; further ones follow as these end."""
RETRY_SECONDS = 0.5
_OVERLOADED = 503
_PUMP_SECONDS = 0.05


class LLM:
    """A model behind the pipeline's processes, without HTTP.

    ``LLM(model, max_num_seqs=128, …)`` takes the settings of ``penstock serve`` by their names, but
    for those of HTTP and admission (the environment's ``PENSTOCK_*`` counts too), and returns when
    the engine is ready. All processes
    end with this object, with the interpreter, or when this process is killed. Several threads
    may call; one call runs at a time.

    Raises ``ConfigError`` for wrong settings, ``TypeError`` for unknown ones, ``ServerFailed``
    when the model cannot be served.
    """

    def __init__(self, model: str = "", **settings: Any) -> None:
        self._server = ServerProcess({"model": model, **settings} if model else settings)
        try:
            self._client = PipelineClient(self._server.router)
        except BaseException:
            self._server.close()
            raise
        self._closed = False
        atexit.register(self.close)

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        max_concurrency: int = MAX_OPEN,
    ) -> list[RequestOutput]:
        """Complete prompts (text or token ids, one or a list); results in the prompts' order.

        ``sampling_params``: for all prompts, or one for each. ``progress``: show a line on standard
        error; by default on a terminal. ``max_concurrency``: so many requests are open at a time.
        Raises ``ValueError`` for a prompt or parameter that is wrong and ``RequestError`` for one
        that the server gave up; the other prompts are then cancelled.
        """
        listed = list_of_prompts(prompts)
        works = messages_of(listed)
        return self._run(listed, works, sampling_params, progress, max_concurrency)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        progress: bool | None = None,
        max_concurrency: int = MAX_OPEN,
    ) -> list[RequestOutput]:
        """Answer conversations (one, or a list of them) through the model's chat template.

        Messages, ``tools`` and ``tool_choice`` are those of the HTTP API, read by the same rules;
        what is called and thought stands beside the text. The rest is as in ``generate``.
        """
        output = tools_of(tools, tool_choice)
        prompts = chats_of(messages)
        given = [None] * len(prompts)
        return self._run(given, prompts, sampling_params, progress, max_concurrency, output)

    def _run(
        self,
        given: Sequence[PromptLike | None],
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool | None,
        max_open: int,
        output: OutputFormat | None = None,
    ) -> list[RequestOutput]:
        if self._closed:
            raise RuntimeError("this LLM is closed")
        if max_open < 1:
            raise ValueError(f"max_concurrency is {max_open}; at least one request must be open")
        params = _spread(sampling_params, len(given))
        works = map(_work, prompts, params, itertools.repeat(output))
        shown = sys.stderr.isatty() if progress is None else progress
        with self._client.lock, ProgressLine(len(given), shown) as line:
            submissions = self._collect(works, len(given), line, max_open)
        return [_output(prompt, one) for prompt, one in zip(given, submissions, strict=True)]

    def _collect(
        self, prepared: Iterable[Work], count: int, line: ProgressLine, max_open: int
    ) -> list[Submission]:
        """Run all requests, ``max_open`` at a time; on an error cancel what is left.

        The first are on their way while the others are still prepared, and all are prepared before
        any is awaited: a wrong prompt is found at once.
        """
        client = self._client
        done: dict[int, Submission] = {}
        waiting = deque(range(min(max_open, count), count))
        running: dict[int, Submission] = {}
        works: list[Work] = []
        pause_until = 0.0
        try:
            pump_at = time.monotonic() + _PUMP_SECONDS
            for number, work in enumerate(prepared):
                works.append(work)
                if number < max_open:
                    running[number] = client.submit(work)
                if time.monotonic() >= pump_at:  # many prompts take seconds: what is open goes on
                    client.pump(0.0)
                    pump_at = time.monotonic() + _PUMP_SECONDS
            while waiting or running:
                while waiting and len(running) < max_open and time.monotonic() >= pause_until:
                    number = waiting.popleft()
                    running[number] = client.submit(works[number])
                client.pump(0.1)
                for number, one in [found for found in running.items() if found[1].done]:
                    if _wants_retry(one.progress):
                        waiting.appendleft(number)
                        pause_until = time.monotonic() + RETRY_SECONDS
                    else:
                        _check(number, one.progress)
                        done[number] = one
                        line.finished(one.progress.usage.completion)
                    del running[number]
                if not self._server.alive:
                    raise ServerFailed(f"the server has ended: {self._server.last_words()}")
        finally:
            for one in running.values():
                client.ledger.cancel(one.id)
        return [done[number] for number in range(count)]

    def close(self) -> None:
        """End all processes. The object is of no use afterwards."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self.close)
            self._client.close()
            self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self.close()


def _spread(
    given: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    if len(given) != count:
        raise ValueError(f"{len(given)} sampling_params for {count} prompts; give one, or one each")
    return list(given)


def _work(prompt: Prompt, params: SamplingParams, output: OutputFormat | None) -> Work:
    """Checks the parameters' ranges. Raises ``ValueError``.

    ``structured_outputs`` may be the object that a client of the API would send.
    """
    grammar: Any = params.structured_outputs
    if isinstance(grammar, dict):
        made = from_structured_outputs(grammar)
        params = msgspec.structs.replace(params, structured_outputs=made)
    try:
        # Constructing a Struct checks nothing; decoding does.
        checked = msgspec.convert(msgspec.to_builtins(params), SamplingParams)
        msgspec.msgpack.encode(checked)  # it must be able to travel
    except (msgspec.ValidationError, OverflowError) as error:
        raise ValueError(_first_fault(params) or plain_error(error)) from None
    except UnicodeEncodeError:
        check_text(msgspec.structs.asdict(params), "sampling_params")
        raise
    choices = [ChoiceState(number) for number in range(checked.n)]
    head = RequestHead(prompt_kind=kind_of(prompt), streamed=False)
    return Work(head, prompt, checked, choices, output)


def _first_fault(params: SamplingParams) -> str:
    """What is wrong with the first parameter that is not as it is declared."""
    for name, parameter in PARAMETERS.items():
        try:
            read(msgspec.to_builtins(getattr(params, name)), parameter.type, name)
        except InvalidValue as invalid:
            return f"sampling_params: {invalid}"
    return ""


def _wants_retry(progress: RequestProgress) -> bool:
    rejected = progress.rejected
    return rejected is not None and rejected.status == _OVERLOADED and bool(progress.unaccepted)


def _check(number: int, progress: RequestProgress) -> None:
    rejected = progress.rejected
    if rejected is not None:
        kind = ValueError if rejected.status < 500 else RequestError
        raise kind(f"prompt {number}: {rejected.message}")
    if progress.failed is not None:
        raise RequestError(f"prompt {number}: {progress.failed.message}")


def _output(given: PromptLike | None, submission: Submission) -> RequestOutput:
    request = submission.request
    if request is None:
        raise RequestError("the request was never submitted")
    outputs = []
    for number, answer in enumerate(submission.answers):
        reason, stop = answer.finish
        outputs.append(
            CompletionOutput(
                number,
                answer.text,
                list(array("i", bytes(request.choices[number].output))),
                reason,
                stop,
                _logprobs(answer.details),
                answer.reasoning,
                [ToolCall(*call) for call in answer.calls()],
            )
        )
    return RequestOutput(
        given if isinstance(given, str) else None,
        _prompt_ids(given, request.prompt),
        outputs,
        submission.progress.usage.cached,
        _prompt_logprobs(submission.answers[0].details),
    )


def _prompt_ids(given: PromptLike | None, computed: bytes) -> list[int]:
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


def _logprobs(details: list[RowDetails]) -> list[dict[int, Logprob]] | None:
    rows = [row.tokens for row in details if row.tokens is not None]
    return [_by_id(token) for named in rows for token in unpack(named)] or None


def _prompt_logprobs(details: list[RowDetails]) -> list[dict[int, Logprob] | None] | None:
    for row in details:
        if row.prompt is not None:
            return [None, *(_by_id(token) for token in unpack(row.prompt, 1))]
    return None
