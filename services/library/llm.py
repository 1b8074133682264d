"""``LLM``: text from a model in a few lines, with the same processes as a server."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Unpack

from penstock.protocol.model_info import read_model_info
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.requests import OutputFormat, Prompt, Work, prompts_of
from penstock.services.library.beam_calls import BeamCalls
from penstock.services.library.local_pipeline import LocalPipeline
from penstock.services.library.member import MAX_OPEN, Submission
from penstock.services.library.outputs import RequestOutput
from penstock.services.library.pooled_calls import PooledCalls
from penstock.services.library.progress import ProgressBar
from penstock.services.library.prompt_window import PromptWindow
from penstock.services.library.prompts import (
    Message,
    PlainPrompt,
    PromptLike,
    chats_of,
    list_of_prompts,
    messages_of,
    tools_of,
)
from penstock.services.library.requests import (
    Asked,
    Terms,
    all_asked,
    all_checked,
    checked_work,
    spread,
)
from penstock.services.library.results import output_of


class LLM(BeamCalls, PooledCalls, LocalPipeline):
    """A model behind the pipeline's processes, without HTTP.

    ``LLM(model, max_num_seqs=128, …)`` takes the settings of ``penstock serve`` by their names, but
    for those of HTTP and admission (the environment's ``PENSTOCK_*`` counts too), and returns when
    the engine is ready. All processes
    end with this object, with the interpreter, or when this process is killed. Several threads
    may call; one call runs at a time.

    Raises ``ConfigError`` for wrong settings, ``TypeError`` for unknown ones, ``ServerFailed``
    when the model cannot be served.
    """

    _numbers = 0
    """Requests so far: each has its number as its id, in all log lines."""

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        progress: bool | None = None,
        max_concurrency: int = MAX_OPEN,
        **terms: Unpack[Terms],
    ) -> list[RequestOutput]:
        """Complete prompts (text or token ids, one or a list); results in the prompts' order.

        ``sampling_params``, ``priority`` (lower goes first under the policy ``priority``): for all
        prompts, or one for each. ``progress``: show a bar on standard error; by default where
        that is a terminal. ``max_concurrency``: so many requests are open at a time. ``terms``:
        ``user``, ``cache_salt``, ``deadline_s`` and ``trace_headers``, for all prompts (``Terms``).
        Raises ``ValueError`` for a prompt or parameter that is wrong and ``RequestError`` for one
        that the server gave up; the other prompts are then cancelled.
        """
        listed = list_of_prompts(prompts)
        asked = all_asked("generate", terms, priority, len(listed))
        ready = messages_of(listed)
        return self._run(listed, ready, sampling_params, asked, progress, max_concurrency)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        priority: int | Sequence[int] = 0,
        progress: bool | None = None,
        max_concurrency: int = MAX_OPEN,
        **terms: Unpack[Terms],
    ) -> list[RequestOutput]:
        """Answer conversations (one, or a list of them) through the model's chat template.

        Messages, ``tools``, ``tool_choice`` and ``chat_template_kwargs`` (as ``enable_thinking``)
        are those of the HTTP API, read by the same rules; what is called and thought stands beside
        the text. The rest is as in ``generate``.
        """
        output = tools_of(tools, tool_choice)
        prompts = chats_of(messages, chat_template_kwargs)
        asked = all_asked("chat", terms, priority, len(prompts))
        given = [None] * len(prompts)
        return self._run(given, prompts, sampling_params, asked, progress, max_concurrency, output)

    def _run(
        self,
        given: Sequence[PlainPrompt | None],
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        asked: Sequence[Asked],
        progress: bool | None,
        max_open: int,
        output: OutputFormat | None = None,
    ) -> list[RequestOutput]:
        params = spread(sampling_params, len(given))
        checked = all_checked(params)
        works = map(checked_work, prompts, checked, itertools.repeat(output), asked)
        submissions = self._submitted(works, len(given), progress, max_open)
        return [
            output_of(prompt, one, "final") for prompt, one in zip(given, submissions, strict=True)
        ]

    def _finished(
        self, works: Sequence[Work], progress: bool | None, max_open: int
    ) -> list[Submission]:
        return self._submitted(works, sum(len(prompts_of(w)) for w in works), progress, max_open)

    def _labels(self) -> list[str]:
        return self._client.capacity.labels

    def _longest(self) -> int:
        return self._client.capacity.max_model_len

    def _end_tokens(self) -> list[int]:
        return read_model_info(self._server.folder).eos_token_ids

    def _submitted(
        self, works: Iterable[Work], count: int, progress: bool | None, max_open: int
    ) -> list[Submission]:
        self.check_open()
        if max_open < 1:
            raise ValueError(f"max_concurrency is {max_open}; at least one request must be open")
        with self._client.lock, ProgressBar(count, progress) as bar:
            return self._collect(works, count, bar, max_open)

    def _collect(
        self, prepared: Iterable[Work], count: int, bar: ProgressBar, max_open: int
    ) -> list[Submission]:
        """Run all requests, with ``max_open`` prompts at a time; on an error cancel what is left.
        count: of the prompts."""
        window = PromptWindow(self._client, bar, self._numbers, max_open)
        self._numbers += count
        try:
            window.prepare(prepared)
            while window.goes_on:
                window.send()
                self._client.pump(0.1)
                window.take()
                self.check_alive()
        finally:
            window.cancel()
        return window.ended()
