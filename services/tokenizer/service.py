"""The tokenizer's process: text to tokens in threads, tokens to text on the loop."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from concurrent.futures import CancelledError, Future
from functools import partial

import msgspec

from penstock.protocol.config import Config
from penstock.protocol.config.derive import CORES_A_FRONTEND
from penstock.protocol.model_info import BadModelFolder, ModelInfo, fingerprint, read_model_info
from penstock.protocol.ownership.guard import MakeGuard
from penstock.protocol.ownership.owned_request import MakeStream
from penstock.protocol.ownership.tokenizer import TokenizerLedger
from penstock.protocol.pooling import read_pooling
from penstock.protocol.process import garbage, logs
from penstock.protocol.process.async_service import AsyncService
from penstock.protocol.process.metrics import Registry
from penstock.protocol.process.spans import SPANS
from penstock.protocol.process.trace import ENCODE, TRACE
from penstock.protocol.tasks import GENERATE, OF_FOLDERS, OF_TOKENIZERS, load_tasks
from penstock.protocol.trace_context import log_fields
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.membership import Identity, Peer, Phase
from penstock.protocol.wire.messages.requests import (
    TOKEN_BYTES,
    Rejected,
    RequestHead,
    Work,
    prompts_of,
)
from penstock.services.tokenizer.banned_strings import BannedStrings
from penstock.services.tokenizer.choice_stream import ChoiceStream
from penstock.services.tokenizer.encode_room import EncodeRoom, work_bytes
from penstock.services.tokenizer.encode_threads import EncodeThreads
from penstock.services.tokenizer.folder_tasks import FolderTasks
from penstock.services.tokenizer.grammar_check import GrammarCheck, GrammarsBusy
from penstock.services.tokenizer.own_tasks import Answered, answer
from penstock.services.tokenizer.parsed_stream import ParsedStream
from penstock.services.tokenizer.pooled_stream import PooledStream
from penstock.services.tokenizer.preparation import (
    Prepared,
    may_be_quick,
    may_have_grammar,
    prepare,
)
from penstock.services.tokenizer.prompt_error import WINDOW_EXCEEDED, PromptError, virtual_words
from penstock.services.tokenizer.text_model import TextModel

ENCODE_THREADS = 3
"""One more than a tenant may hold."""
GRAMMAR_THREADS = 4
"""Requests with a grammar have threads of their own: they wait there for a verdict on it. Here too
a tenant may hold all but one."""
MAX_VETTING = 128
"""Requests with a grammar that wait for a thread or a verdict, half of them of one tenant; they
leave room for the others."""
MAX_ENCODING = 2048
"""Requests that wait for or are in encoding, half of them of one tenant; one more is handed back
with 503 or 429."""
MAX_ENCODING_BYTES = 256 * 1024 * 1024
"""The same in bytes, for those with a grammar and for all others."""
ENCODE_SECONDS = 30.0
"""A template and an encoding together may take this long, and may wait as long for a thread."""
LOST_SECONDS = 60.0
"""A thread that takes longer is lost (a template ends after 5 s, an encoding after less), and the
process ends: its requests go on in another one, with all its threads."""
LOST_THREAD = 7
"""Exit code."""
_KINDS = {400: "invalid_request_error", 429: "rate_limit_error", 503: "overloaded_error"}


class TokenizerService(AsyncService):
    """Owns submissions between ``Taken`` and their end."""

    name = "tokenizer"

    def __init__(self, config: Config) -> None:
        self.info: ModelInfo = read_model_info(config.model.model)
        self._fingerprint = fingerprint(self.info.folder)
        super().__init__(config)
        self.metrics = Registry()
        self._encode_seconds = self.metrics.histogram("encode_seconds").observe
        self.text: TextModel | None = None
        self.tasks = load_tasks()
        self._folder_tasks = FolderTasks(read_pooling(self.info, config.model), self.info)
        self._tasks_of_others: dict[str, FolderTasks] = {}
        """What this process was not started for, but another engine of the model."""
        self.encoding: dict[tuple[int, int], asyncio.TimerHandle] = {}
        self._vetting: set[tuple[int, int]] = set()
        """The requests of ``encoding`` that have a grammar."""
        self._room = EncodeRoom(MAX_ENCODING, MAX_ENCODING_BYTES)
        self._vetting_room = EncodeRoom(MAX_VETTING, MAX_ENCODING_BYTES)
        self._threads = EncodeThreads(ENCODE_THREADS, ENCODE_THREADS - 1)
        self._grammar_threads = EncodeThreads(
            GRAMMAR_THREADS, GRAMMAR_THREADS - 1, first=ENCODE_THREADS
        )
        self.grammars = GrammarCheck(
            self.info.folder, self.info.vocab_size, self.info.eos_token_ids
        )
        self.ledger = TokenizerLedger(
            self.mailbox.address,
            self.participant,
            self.mailbox.send,
            self._begin,
        )

        self.ledger.on_taken_over = self.metrics.histogram("hand_over_seconds").observe

    def identity(self) -> Identity:
        return Identity(
            os.getpid(),
            socket.gethostname(),
            model=self.config.model.names()[0],
            fingerprint=self._fingerprint,
        )

    async def start(self) -> None:
        self.set_phase(Phase.LOADING, "reading the tokenizer")
        folder, vocab_size = self.info.folder, self.info.vocab_size
        parsers = self.config.model.tool_parser, self.config.model.reasoning_parser
        loading = self._threads.submit("", TextModel.load, folder, vocab_size, parsers)
        self.text = await asyncio.wrap_future(loading)
        if self.text.has_chat_template:
            self.log.info(self.text.form.describe())
        garbage.settle()
        self.set_phase(Phase.READY)

    # --- encoding

    def _max_model_len(self, head: RequestHead) -> int:
        """The shortest limit of the model's engines that are there and do a request's task, else
        the model's own; without the virtual tokens that stand ahead of the prompt."""
        engines = [
            peer.capacity
            for peer in self.participant.of("scheduler")
            if peer.capacity.max_model_len and peer.identity.fingerprint == self._fingerprint
        ]
        doing = [one for one in engines if head.task in one.done] or engines
        longest = min((one.max_model_len for one in doing), default=self.info.max_model_len)
        return max(1, longest - head.virtual_tokens)

    def _tasks_for(self, task: str) -> FolderTasks:
        """What the folder makes of prompts for a task, whatever ``--task`` says here."""
        own = self._folder_tasks
        if task not in OF_FOLDERS or task in own.pooling.tasks:
            return own
        found = self._tasks_of_others.get(task)
        if found is None:
            model = msgspec.structs.replace(self.config.model, task=task)
            try:
                found = FolderTasks(read_pooling(self.info, model), self.info)
            except BadModelFolder:  # no engine does it
                found = own
            self._tasks_of_others[task] = found
        return found

    def _begin(self, request_id: int, attempt: int, work: Work) -> None:
        if self.text is None:
            self._refuse(request_id, attempt, 503, "the tokenizer is still loading; try again")
            return
        task = work.head.task
        if task not in (GENERATE, *OF_TOKENIZERS, *OF_FOLDERS, *self.tasks):
            message = f"the tokenizer does not know the task {task!r}: install its package here too"
            self._refuse(request_id, attempt, 400, message)
            return
        if may_be_quick(work):
            self._prepare_now(request_id, attempt, work)
            return
        head, tenant = work.head, work.head.tenant
        plain = not may_have_grammar(work)
        room = self._room if plain else self._vetting_room
        size, prompts = work_bytes(work), len(prompts_of(work))
        if not work.head.accepted and (lack := room.lacks(tenant, size, prompts)):
            self._refuse(request_id, attempt, *lack)
            return
        room.enter((request_id, attempt), tenant, size, prompts)
        if not plain:
            self._vetting.add((request_id, attempt))
        threads = self._threads if plain else self._grammar_threads
        known = (work, self.text, self.info, self._max_model_len(head))
        future: Future[Prepared] | Future[Answered]
        if task in OF_TOKENIZERS:
            future = threads.submit(tenant, answer, *known)
        else:
            seed = work.params.seed or 0
            strictness = self.config.model.tool_strictness
            make = partial(prepare, folder_tasks=self._tasks_for(task))
            future = threads.submit(tenant, make, *known, seed, self.grammars, strictness)
        began = self.loop.time()
        self.encoding[request_id, attempt] = self.loop.call_at(
            began + ENCODE_SECONDS, self._too_late, request_id, attempt, future
        )
        future.add_done_callback(
            lambda done: self.loop.call_soon_threadsafe(
                self._encoded, request_id, attempt, head, began, done
            )
        )

    def _prepare_now(self, request_id: int, attempt: int, work: Work) -> None:
        """Prepare a request that takes less time than to wake a thread for it."""
        began, done = self.loop.time(), Future[Prepared]()
        task, text = work.head.task, self._text_model()
        known = text, self.info, self._max_model_len(work.head), work.params.seed or 0
        traced = time.monotonic_ns() if TRACE.on else 0
        try:
            done.set_result(prepare(work, *known, folder_tasks=self._tasks_for(task)))
        except Exception as error:
            done.set_exception(error)
        if traced:
            TRACE.add(ENCODE, traced)
        self._encoded(request_id, attempt, work.head, began, done)

    def _text_model(self) -> TextModel:
        if self.text is None:
            raise RuntimeError("a request was prepared before the tokenizer was read")
        return self.text

    def _too_late(
        self, request_id: int, attempt: int, future: Future[Prepared] | Future[Answered]
    ) -> None:
        """Time is over, for a job that is under way or for one that no thread has taken."""
        if future.cancel():
            message = f"no thread took the prompt within {ENCODE_SECONDS:g} s; try again"
            self._refuse(request_id, attempt, 503, message)
        elif (request_id, attempt) in self._vetting:
            message = f"no verdict on the grammar within {ENCODE_SECONDS:g} s; try again"
            self._refuse(request_id, attempt, 503, message)
        else:
            message = f"the prompt could not be rendered and encoded within {ENCODE_SECONDS:g} s"
            self._refuse(request_id, attempt, 400, message)

    def _encoded(
        self,
        request_id: int,
        attempt: int,
        head: RequestHead,
        began: float,
        done: Future[Prepared] | Future[Answered],
    ) -> None:
        """``began``: when it came, by the loop's clock."""
        self._vetting.discard((request_id, attempt))
        self._room.leave((request_id, attempt))
        self._vetting_room.leave((request_id, attempt))
        timer = self.encoding.pop((request_id, attempt), None)
        if timer is not None:
            timer.cancel()
        if SPANS.on:
            self._record(head, attempt, began, done)
        try:
            found = done.result()
        except CancelledError:
            return
        except PromptError as error:
            error.__traceback__ = None  # it holds the prompt, in a circle
            words = virtual_words(head) if error.code == WINDOW_EXCEEDED else ""
            told = str(error) + words, error.param, error.code, error.choice
            self._refuse(request_id, attempt, 400, *told)
            return
        except GrammarsBusy as error:
            self._refuse(request_id, attempt, 503, str(error))
            return
        except Exception:
            self.log.exception("encoding failed", **log_fields(head))
            self._refuse(request_id, attempt, 500, "the prompt could not be encoded")
            return
        if isinstance(found, Answered):
            self.ledger.answered(request_id, attempt, *found)
        else:
            self._encode_seconds(self.loop.time() - began)
            made = self._streams(request_id, found), time.monotonic(), self._guards(found)
            self.ledger.encoded(request_id, attempt, found.work, found.params, *made)
            if logs.wants("debug"):
                tokens = len(found.work.prompt) // TOKEN_BYTES
                facts = {"attempt": attempt, "prompt_tokens": tokens}
                logs.record("debug", "request encoded", facts | log_fields(head))
        self.flush()

    def _record(
        self,
        head: RequestHead,
        attempt: int,
        began: float,
        done: Future[Prepared] | Future[Answered],
    ) -> None:
        """The span of an encoding that is over; the loop's clock is the monotonic one."""
        facts, error = {"penstock.attempt": attempt}, ""
        if done.cancelled():
            error = "timeout"
        elif (raised := done.exception()) is not None:
            error = type(raised).__name__
        elif isinstance(found := done.result(), Prepared):
            facts["penstock.prompt_tokens"] = len(found.work.prompt) // TOKEN_BYTES
        SPANS.record("encode", head.trace, began, self.loop.time(), facts, error)

    def _streams(self, request_id: int, prepared: Prepared) -> MakeStream:
        """What makes the streams of the request's choices."""
        work, params, reading, pooling = prepared
        text, task = self._text_model(), self.tasks.get(work.head.task)
        if work.head.task in OF_FOLDERS:
            task = self._tasks_for(work.head.task).task(work.head.task, pooling)
        if task is not None:
            stream = PooledStream(task)
            return lambda choice: stream
        if reading is None:
            return lambda choice: ChoiceStream(text, params, work.prompt)
        return lambda choice: ParsedStream(
            text, params, work.prompt, reading, reading.parser(request_id, choice)
        )

    def _guards(self, prepared: Prepared) -> MakeGuard | None:
        """What makes the guards of the request's choices, if they have any."""
        work, params, reading, _ = prepared
        if not params.banned_strings or self.text is None or work.head.task != GENERATE:
            return None
        made = self.text, params, work.sampling
        return partial(BannedStrings, *made, with_stops=reading is None)

    def _refuse(
        self,
        request_id: int,
        attempt: int,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        choice: int = 0,
    ) -> None:
        kind = _KINDS.get(status, "server_error")
        retry = 1.0 if status in (429, 503) else None
        rejected = Rejected(
            *(request_id, attempt, status, kind, message, param),
            retry_after=retry,
            code=code,
            choice=choice,
        )
        self.ledger.refuse(request_id, attempt, rejected)
        self.flush()

    # --- messages

    def on_message(self, sender: int, message: Message, now: float) -> None:
        if not self.ledger.handle(sender, message, now):
            self.metrics.inc("dropped_messages_total", "unexpected")

    def on_gone(self, gone: dict[int, Peer], now: float) -> None:
        self.ledger.peers_gone(gone, now)

    def on_tick(self, now: float) -> None:
        self._check_threads(now)
        self.ledger.tick(now)
        self.status.load = sum(one.open_choices for one in self.ledger.open.values())
        self.metrics.set("queue_depth", len(self.encoding), "tokenizer")
        continued = self.metrics.counter("continuations_total", "tokenizer")
        continued.value = float(self.ledger.continuations)
        self.metrics.counter("redraws_total").value = float(self.ledger.redraws)
        model = self.config.model.names()[0]
        self.metrics.set("queue_age_seconds", self._queue_age(), "tokenizer", model)
        self.report(self.metrics)

    def _queue_age(self) -> float:
        """Seconds that messages wait for the loop, or the oldest request for the end of its
        encoding."""
        first = next(iter(self.encoding.values()), None)
        if first is None:
            return self.loop_delay
        return max(self.loop_delay, self.loop.time() - (first.when() - ENCODE_SECONDS))

    def _check_threads(self, now: float) -> None:
        """End the process when a thread is lost; reading the tokenizer may take any time."""
        pools = (self._threads, self._grammar_threads)
        seconds = max(pool.oldest(now) for pool in pools)
        if self.text is None or seconds <= LOST_SECONDS:
            return
        self.log.error(
            f"a thread has been at one prompt for {seconds:.0f} s and cannot be stopped; this "
            "process ends so that another one can take its place"
        )
        self.exit_code = LOST_THREAD
        self._finished.set()

    def on_drain(self) -> None:
        self.ledger.draining = True

    def drained(self) -> bool:
        return not self.ledger.open


def run(config: Config) -> int:
    """Run a tokenizer until SIGTERM. Returns the exit code. Raises ``BadModelFolder``."""
    # Of the tokenizers library: the cores that serve has for each tokenizer.
    os.environ.setdefault("RAYON_NUM_THREADS", str(min(CORES_A_FRONTEND, os.cpu_count() or 1)))
    return TokenizerService(config).run()
