"""``LLMEngine``: requests are added and steps are taken by the caller's own loop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Unpack

import msgspec

from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.requests import Prompt, Work
from penstock.services.library.local_pipeline import LocalPipeline
from penstock.services.library.member import Submission, retry_seconds
from penstock.services.library.outputs import RequestOutput
from penstock.services.library.prompts import (
    Message,
    PlainPrompt,
    PromptLike,
    chats_of,
    one_prompt,
    tools_of,
)
from penstock.services.library.requests import Terms, asked_of, work_of
from penstock.services.library.results import OutputKind, check, output_of, wants_retry

STEP_SECONDS = 0.1


class ModelLimits(msgspec.Struct, frozen=True):
    """What is served."""

    model: str
    max_model_len: int
    """Tokens of prompt and output together."""
    vocab_size: int


class _Added(msgspec.Struct, eq=False):
    given: PlainPrompt | None
    work: Work
    kind: OutputKind
    called: float
    submission: Submission | None = None
    refusals: int = 0
    """How often the server had no room for it."""


class LLMEngine(LocalPipeline):
    """A model behind the pipeline's processes, for programs that drive it step by step.

    Takes the settings of ``LLM`` and raises what it raises. Several threads may call; one call
    runs at a time.
    """

    def __init__(self, model: str = "", **settings: Any) -> None:
        super().__init__(model, **settings)
        self._requests: dict[str, _Added] = {}
        self._ready: dict[str, None] = {}
        """Requests of which something has come, in the order in which it did."""
        self._again: list[tuple[float, str, _Added]] = []
        """(when, which) is sent again: the server had no room for it."""

    def add_request(
        self,
        request_id: str,
        prompt: PromptLike | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        output_kind: OutputKind = "cumulative",
        **terms: Unpack[Terms],
    ) -> None:
        """Send a request: text, token ids, or the messages of a chat. ``step`` brings what comes,
        of the kind that ``AsyncLLM.generate`` describes, as it does ``priority`` and ``terms``.
        Raises ``ValueError``."""
        asked = asked_of("add_request", terms, priority)
        if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], dict):
            given, output = None, tools_of(None, None)
            ready: Prompt = chats_of([prompt], None)[0]
        else:
            given, ready = one_prompt(prompt)  # type: ignore[arg-type]
            output = None
        streamed = output_kind != "final"
        params = sampling_params or SamplingParams()
        work = work_of(ready, params, output, asked, streamed=streamed)
        with self._client.lock:
            self.check_open()
            if request_id in self._requests:
                raise ValueError(
                    f"request_id {request_id!r} runs already; give each request its own"
                )
            added = self._requests[request_id] = _Added(given, work, output_kind, time.monotonic())
            self._submit(request_id, added)

    def _submit(self, request_id: str, added: _Added) -> None:
        def wake() -> None:
            self._ready[request_id] = None

        added.submission = self._client.submit(added.work, request_id, wake, called=added.called)

    def step(self, seconds: float = STEP_SECONDS) -> list[RequestOutput]:
        """Wait up to ``seconds`` until something comes; returns what has come, an output for each
        request of which anything has.

        Raises ``RequestRefused`` (a ``ValueError``) or ``RequestError`` for one that ended with an
        error: its id is the error's ``request_id``, it is no request any more, and what has come
        of the others comes with the next step.
        """
        deadline = time.monotonic() + seconds
        while True:
            with self._client.lock:
                self.check_open()
                self._send_again()
                left = deadline - time.monotonic()
                self._client.pump(0.0 if self._ready else max(0.0, left))
                self.check_alive()
                outputs: list[RequestOutput] = []
                for request_id in list(self._ready):
                    if (output := self._take(request_id, bool(outputs))) is not None:
                        outputs.append(output)
            if outputs or left <= 0:
                return outputs

    def _send_again(self) -> None:
        now = time.monotonic()
        due = [one for one in self._again if one[0] <= now]
        if due:
            self._again = [one for one in self._again if one[0] > now]
        for _, request_id, added in due:
            if self._requests.get(request_id) is added:
                self._submit(request_id, added)

    def _take(self, request_id: str, has_others: bool) -> RequestOutput | None:
        """What has come of a request. An error waits for the next step where there is anything
        else."""
        added = self._requests.get(request_id)
        if added is None or added.submission is None:
            del self._ready[request_id]
            return None
        submission = added.submission
        if wants_retry(submission.progress):
            del self._ready[request_id]
            self._again.append(
                (time.monotonic() + retry_seconds(added.refusals), request_id, added)
            )
            added.refusals += 1
            return None
        if submission.progress.rejected or submission.progress.failed:
            if has_others:
                return None
            self._forget(request_id)
            check(f"request {request_id}", submission.progress, request_id)
        del self._ready[request_id]
        if submission.done:
            del self._requests[request_id]
        elif added.kind == "final":
            return None
        return output_of(added.given, submission, added.kind)

    def _forget(self, request_id: str) -> None:
        self._ready.pop(request_id, None)
        added = self._requests.pop(request_id, None)
        if added is not None and added.submission is not None:
            self._client.ledger.cancel(added.submission.id)

    def abort_request(self, request_id: str | Sequence[str]) -> None:
        """End one or several requests; nothing more comes of them. Unknown ids are ignored."""
        with self._client.lock:
            for one in [request_id] if isinstance(request_id, str) else request_id:
                self._forget(one)

    def has_unfinished_requests(self) -> bool:
        """Whether a step may bring something."""
        return bool(self._requests)

    def get_num_unfinished_requests(self) -> int:
        """How many requests were added and have not ended."""
        return len(self._requests)

    def get_model_config(self) -> ModelLimits:
        with self._client.lock:
            capacity = self._client.capacity
            return ModelLimits(self._client.model, capacity.max_model_len, capacity.vocab_size)
