"""``AsyncLLM``: many requests at once from an asyncio program, each a stream of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import msgspec

from penstock.client.tokens import ids_of
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.tasks import TOKENIZE
from penstock.protocol.wire.messages.requests import Work
from penstock.services.library.async_client import AsyncPipelineClient
from penstock.services.library.member import MAX_OPEN, Submission, retry_seconds
from penstock.services.library.outputs import RequestError, RequestOutput
from penstock.services.library.pooled_calls import AsyncPooledCalls
from penstock.services.library.prompts import (
    Message,
    PlainPrompt,
    PromptLike,
    chats_of,
    one_prompt,
    tools_of,
)
from penstock.services.library.requests import Terms, asked_of, task_work, work_of
from penstock.services.library.results import (
    OutputKind,
    aborted_output,
    check,
    output_of,
    wants_retry,
)
from penstock.services.library.server_process import (
    ServerFailed,
    ServerProcess,
    arguments_for,
)

CLOSED = "this AsyncLLM is closed"
_JOIN_LOOK_SECONDS = 0.02
Found = TypeVar("Found")


class _AwaitedRequest(msgspec.Struct, eq=False, weakref=True):
    """A request whose generator waits for what comes, and how it is woken."""

    called: str = ""
    """Its id, where the caller gave one."""
    updates: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    aborted: bool = False

    def abort(self) -> None:
        self.aborted = True
        self.updates.set()


class _Processes:
    """What must end with an ``AsyncLLM``, whoever ends it."""

    def __init__(self) -> None:
        self.server: ServerProcess | None = None
        self.client: AsyncPipelineClient | None = None
        self.is_released = False

    def start(self, settings: dict[str, Any]) -> str:
        """Blocks until the engine is ready; returns the router's address."""
        server = self.server = ServerProcess(settings, "AsyncLLM")
        if self.is_released:
            server.release()
        return server.wait_ready()

    def release(self) -> None:
        """Let them end, without waiting for that. Idempotent, from any thread."""
        self.is_released = True
        if self.client is not None:
            self.client.leave()
        if self.server is not None:
            self.server.release()


class AsyncLLM(AsyncPooledCalls):
    """A model behind the pipeline's processes, for asyncio.

    ``AsyncLLM(model, max_num_seqs=128, …)`` takes the settings of ``LLM``. The processes start with
    ``async with``, ``await start()`` or the first request, while the event loop goes on. They end
    with ``await close()``, when nothing holds this object any more, with the interpreter, or when
    this process is killed. One object belongs to one event loop.

    Raises ``TypeError`` for unknown settings and ``ConfigError`` for wrong ones at once; what is
    wrong with the model is a ``ServerFailed`` of the start.
    """

    def __init__(self, model: str = "", **settings: Any) -> None:
        self._settings = {"model": model, **settings} if model else settings
        arguments_for(self._settings, "AsyncLLM")
        self._processes = _Processes()
        self._release = weakref.finalize(self, self._processes.release)
        self._starting: asyncio.Task[AsyncPipelineClient] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._slots = asyncio.Semaphore(MAX_OPEN)
        self._awaited: dict[str, _AwaitedRequest] = {}
        self._called = weakref.WeakValueDictionary[str, _AwaitedRequest]()
        """Of the newest generator of each id, also while nobody has begun to read it."""
        self._numbers = itertools.count()
        self._failure = ""
        """Why nothing will come any more."""

    async def start(self) -> None:
        """Return when the engine is ready. Raises ``ServerFailed``, ``ConfigError``, and
        ``RuntimeError`` after ``close`` and in another event loop."""
        await self._joined()

    async def _joined(self) -> AsyncPipelineClient:
        if self._failure == CLOSED:
            raise RuntimeError(CLOSED)
        client = self._processes.client
        if client is None:
            if self._starting is None or self._starting.done():  # a start that failed is repeated
                self._starting = asyncio.create_task(self._start())
            client = await asyncio.shield(self._starting)
        if client.loop is not asyncio.get_running_loop():
            raise RuntimeError("this AsyncLLM belongs to another event loop; make one for each")
        return client

    async def _start(self) -> AsyncPipelineClient:
        processes = self._processes
        try:
            router = await _in_thread(lambda: processes.start(self._settings))
            client = processes.client = AsyncPipelineClient(
                router, weakref.WeakMethod(self._check_server)
            )
            while not client.has_joined():
                self._check_server()
                self._raise_failure()
                await asyncio.sleep(_JOIN_LOOK_SECONDS)
        except BaseException as error:
            self._release()
            if self._failure:
                raise ServerFailed(self._failure) from None
            self._processes = _Processes()  # for another try
            self._release = weakref.finalize(self, self._processes.release)
            if isinstance(error, TimeoutError):
                raise ServerFailed(str(error)) from None
            raise
        self._raise_failure()
        return client

    def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
        *,
        priority: int = 0,
        output_kind: OutputKind = "cumulative",
        **terms: Unpack[Terms],
    ) -> AsyncGenerator[RequestOutput]:
        """Complete one prompt, text or token ids; yields as tokens come.

        output_kind: ``cumulative`` yields all that has come so far each time, ``delta`` what has
        come since the last time, ``final`` once, at the end. A reader that is slow gets more at a
        time. request_id: for ``abort``, and in all log lines; one that runs must not be used again.
        priority: a lower one goes first under the policy ``priority``. terms: ``user``,
        ``cache_salt``, ``deadline_s`` and ``trace_headers`` (``Terms``).

        Leaving the generator (``aclose``, a cancelled task) cancels the request. Raises
        ``ValueError`` for a wrong prompt or parameter, ``RequestError`` where the server gives
        the request up, and ``ServerFailed``.
        """
        given, ready = one_prompt(prompt)
        asked = asked_of("generate", terms, priority)
        streamed = output_kind != "final"
        work = work_of(ready, sampling_params or SamplingParams(), None, asked, streamed=streamed)
        return self._outputs(given, work, self._call(request_id), output_kind)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        priority: int = 0,
        output_kind: OutputKind = "cumulative",
        **terms: Unpack[Terms],
    ) -> AsyncGenerator[RequestOutput]:
        """Answer one conversation; arguments as in ``LLM.chat``, the rest as in ``generate``. With
        ``delta``, a tool call that goes on has its id and name again, and new arguments."""
        (ready,) = chats_of([messages], chat_template_kwargs)
        output, asked = tools_of(tools, tool_choice), asked_of("chat", terms, priority)
        streamed = output_kind != "final"
        work = work_of(ready, sampling_params or SamplingParams(), output, asked, streamed=streamed)
        return self._outputs(None, work, self._call(request_id), output_kind)

    async def tokenize(self, text: str) -> list[int]:
        """The token ids of a text, with the special tokens that the model wants around a prompt."""
        _, ready = one_prompt(text)
        done = await self._whole(task_work(TOKENIZE, work_of(ready, SamplingParams())), "")
        return ids_of(done.answers[0])

    async def _whole(self, work: Work, request_id: str) -> Submission:
        name = self._register(request := _AwaitedRequest(request_id))
        async with aclosing(self._submissions(work, name, "final")) as submissions:
            async for submission in submissions:
                check(f"request {name}", submission.progress, request_id)
                if not request.aborted:
                    return submission
        raise RequestError(f"request {name} was given up")

    async def _labels(self) -> list[str]:
        return (await self._joined()).capacity.labels

    async def _outputs(
        self, given: PlainPrompt | None, work: Work, request: _AwaitedRequest, kind: OutputKind
    ) -> AsyncGenerator[RequestOutput]:
        name, submission = self._register(request), None
        async with aclosing(self._submissions(work, name, kind)) as submissions:
            async for submission in submissions:
                check(f"request {name}", submission.progress, name)
                yield output_of(given, submission, kind, aborted=request.aborted)
        if submission is None and request.aborted:
            yield aborted_output(given, name, len(work.choices))

    async def _submissions(
        self, work: Work, name: str, kind: OutputKind
    ) -> AsyncGenerator[Submission]:
        """A request whenever something of it has come, or (``final``) once at its end; nothing of
        one that is given up before it is sent. While the server has no room it is sent again."""
        request, called = self._awaited[name], time.monotonic()
        try:
            client = await _unless_aborted(request, self._joined())
            if client is None or not await self._acquire_slot(request):
                return
            try:
                for attempt in itertools.count():
                    self._raise_failure()
                    submission = client.submit(work, name, request.updates.set, called=called)
                    try:
                        async for one in self._updates(request, submission, kind):
                            yield one
                    finally:
                        client.cancel(submission)
                    if request.aborted or not wants_retry(submission.progress):
                        return
                    pause = asyncio.sleep(retry_seconds(attempt), True)
                    if not await _unless_aborted(request, pause):
                        return
            finally:
                self._slots.release()
        finally:
            del self._awaited[name]

    async def _acquire_slot(self, request: _AwaitedRequest) -> bool:
        """Wait for a place among the open requests; false where it was given up before."""
        if not self._slots.locked():
            return await self._slots.acquire()
        acquired = False

        async def acquire() -> bool:
            nonlocal acquired
            acquired = await self._slots.acquire()
            return acquired

        is_ours = False
        try:
            is_ours = bool(await _unless_aborted(request, acquire()))
            return is_ours
        finally:
            if acquired and not is_ours:
                self._slots.release()

    async def _updates(
        self, request: _AwaitedRequest, submission: Submission, kind: OutputKind
    ) -> AsyncGenerator[Submission]:
        """The request whenever something has come, until it is over or wants to be sent again."""
        over = False
        while not over:
            await request.updates.wait()
            request.updates.clear()
            if wants_retry(submission.progress) and not request.aborted:
                return
            if not submission.done:
                self._raise_failure()
            over = submission.done or request.aborted
            if over or kind != "final":
                yield submission

    def _raise_failure(self) -> None:
        if self._failure:
            raise ServerFailed(self._failure)

    def _call(self, request_id: str) -> _AwaitedRequest:
        """A request whose generator runs when somebody reads it."""
        request = _AwaitedRequest(request_id)
        if request_id:
            self._called[request_id] = request
        return request

    def _register(self, request: _AwaitedRequest) -> str:
        name = request.called
        while not name or (not request.called and name in self._awaited):
            name = f"request-{next(self._numbers)}"
        if name in self._awaited:
            raise ValueError(f"request_id {name!r} runs already; give each request its own")
        self._awaited[name] = request
        return name

    async def abort(self, request_id: str) -> None:
        """End a request: its generator yields once more, with ``abort`` as the reason of what had
        not ended, or once at all where nobody has begun to read it. Unknown ids are ignored."""
        if request := self._awaited.get(request_id) or self._called.get(request_id):
            request.abort()

    def _check_server(self) -> None:
        """Wake everybody where nothing will come any more."""
        processes = self._processes
        if not self._failure:
            if processes.client is not None and processes.client.fenced is not None:
                self._failure = str(processes.client.fenced)
            elif processes.server is not None and not processes.server.alive:
                self._failure = f"the server has ended: {processes.server.last_words()}"
        if self._failure:
            for request in self._awaited.values():
                request.updates.set()

    async def close(self) -> None:
        """End all processes and return when they are gone; what runs ends with ``ServerFailed``.
        Idempotent; works in any event loop."""
        self._failure = CLOSED
        self._check_server()
        self._release()
        server = self._processes.server
        if server is not None:
            await _in_thread(server.close)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


async def _unless_aborted(request: _AwaitedRequest, wanted: Awaitable[Found]) -> Found | None:
    """What is wanted, or ``None`` as soon as the request is given up."""
    task = asyncio.ensure_future(wanted)
    try:
        while not (task.done() or request.aborted):
            update = asyncio.ensure_future(request.updates.wait())
            try:
                await asyncio.wait({task, update}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                update.cancel()
            request.updates.clear()
        return task.result() if task.done() else None
    finally:
        if not task.done():
            task.cancel()


async def _in_thread(work: Callable[[], Found]) -> Found:
    """The result of what blocks. Nothing waits for it where this is cancelled: a download may take
    long, and threads of an event loop's own are joined at its end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Found] = loop.create_future()

    def tell(setter: Callable[[Any], None], value: Any) -> None:
        def set_once() -> None:
            if not future.done():
                setter(value)

        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(set_once)

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            tell(future.set_exception, error)
        else:
            tell(future.set_result, result)

    threading.Thread(target=run, name="penstock", daemon=True).start()
    return await future
