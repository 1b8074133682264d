"""Vets grammars before a request goes to an engine, in a helper that a grammar may ruin.

``GrammarCheck.check`` blocks for at most some seconds (well under one where the helper runs) and
may be called from several threads. What one process has found out about a grammar it remembers.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import msgspec

from penstock.protocol.grammar.request import MAX_SOURCE_BYTES, BadGrammar, Grammar, read_schema
from penstock.services.tokenizer.grammar_process import (
    Answer,
    Ask,
    CannotCompile,
    FrameReader,
    Ready,
    Setup,
    Verdict,
    frame,
)
from penstock.services.tokenizer.prompt_error import PromptError

MAX_VERDICTS = 4096
MAX_VERDICT_BYTES = 1024 * 1024
MAX_WAITING = 64
"""Grammars that wait for their verdict at once."""
SILENCE_SECONDS = 4.0
"""A helper that is asked something and says nothing for so long is replaced: its children take
less each, and it says what came of each."""
VERDICT_SECONDS = 10.0
"""The longest wait for a verdict where many grammars are asked about, or little of the processors
is to be had."""
START_SECONDS = 20.0
"""A helper reads a vocabulary in 1 to 2 s."""
STARTS = 5
START_WINDOW_SECONDS = 60.0
"""``STARTS`` helpers may be started in this time."""
_MODULE = "penstock.services.tokenizer.grammar_process"
_READ = 1 << 16


class GrammarsBusy(RuntimeError):
    """No verdict could be had; the same request may pass a little later."""


class Verdicts:
    """What is known about grammars: the latest ones used, bounded in number and bytes."""

    def __init__(self, entries: int = MAX_VERDICTS, size: int = MAX_VERDICT_BYTES) -> None:
        self._entries, self._size = entries, size
        self._known: OrderedDict[bytes, str | None] = OrderedDict()
        self.size = 0
        """Bytes of keys and reasons."""

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: bytes) -> bool:
        return key in self._known

    def get(self, key: bytes) -> str | None:
        """Why the grammar is refused, or ``None``. Raises ``KeyError`` where nothing is known."""
        self._known.move_to_end(key)
        return self._known[key]

    def put(self, key: bytes, reason: str | None) -> None:
        if key in self._known:
            self.size -= _size(key, self._known.pop(key))
        self._known[key] = reason
        self.size += _size(key, reason)
        while self._known and (len(self._known) > self._entries or self.size > self._size):
            self.size -= _size(*self._known.popitem(last=False))


def _size(key: bytes, reason: str | None) -> int:
    return len(key) + len((reason or "").encode())


class GrammarCheck:
    """Answers whether a grammar can be served by one model. Safe to use from several threads."""

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        ends: list[int],
        *,
        command: Sequence[str] | None = None,
    ) -> None:
        """The helper is started at the first grammar, with ``command`` if that is given."""
        self._command = list(command or _default_command())
        self._setup = Setup(str(folder.absolute()), vocab_size, ends, os.getpid())
        self._lock = threading.Lock()
        self.verdicts = Verdicts()
        self._waiting: dict[bytes, Future[Verdict]] = {}
        self._helper: _Helper | None = None
        self._starts: deque[float] = deque(maxlen=STARTS)
        self._numbers = 0
        self._closed = False

    def check(self, grammar: Grammar) -> None:
        """Return when the grammar is fine.

        Raises ``PromptError`` for one that is refused and ``GrammarsBusy`` where nobody knows.
        """
        key = _key(grammar)
        with self._lock:
            if key in self.verdicts:
                reason = self.verdicts.get(key)
                if reason is not None:
                    raise PromptError(reason, grammar.param)
                return
        try:
            _look(grammar)
        except BadGrammar as error:
            raise PromptError(error.message, error.param) from None
        verdict = self._ask(key, grammar)
        if not verdict.final:
            raise GrammarsBusy(verdict.reason)
        if verdict.reason is not None:
            raise PromptError(verdict.reason, grammar.param)

    def close(self) -> None:
        """End the helper, for good."""
        with self._lock:
            self._closed = True
            helper, self._helper = self._helper, None
        if helper is not None:
            helper.kill()

    @property
    def pid(self) -> int | None:
        """Process id of the helper that runs, if one does."""
        helper = self._helper
        return helper.pid if helper is not None and helper.alive else None

    def _ask(self, key: bytes, grammar: Grammar) -> Verdict:
        """The verdict of the helper, which several requests for one grammar share."""
        with self._lock:
            future = self._waiting.get(key)
            own = future is None
            if future is None:
                if len(self._waiting) >= MAX_WAITING:
                    raise GrammarsBusy(f"{MAX_WAITING} grammars wait to be compiled; try again")
                future = self._waiting[key] = Future()
        if not own:
            try:
                return future.result(START_SECONDS + VERDICT_SECONDS)
            except TimeoutError:
                raise GrammarsBusy("the grammar was not compiled in time; try again") from None
        try:
            verdict = self._vetted(grammar)
        except BaseException as error:
            with self._lock:
                del self._waiting[key]
            future.set_exception(error)
            raise
        with self._lock:
            del self._waiting[key]
            if verdict.final:
                self.verdicts.put(key, verdict.reason)
        future.set_result(verdict)
        return verdict

    def _vetted(self, grammar: Grammar) -> Verdict:
        """Ask the helper; once more where it ends meanwhile, or the child had no time to compile,
        for that may be another's fault."""
        verdict: Verdict | None = None
        for _ in range(2):
            helper, number = self._ready()
            if helper.unservable:
                reason = f"{grammar.param}: {helper.unservable}"
                return Verdict(number, reason)
            verdict = helper.ask(number, grammar)
            if verdict is not None and verdict.final:
                return verdict
        if verdict is not None:
            return verdict
        raise GrammarsBusy("the process that compiles grammars has ended; try again")

    def _ready(self) -> tuple[_Helper, int]:
        """A helper that runs, started where none does, and a number for a question to it."""
        with self._lock:
            self._numbers += 1
            number = self._numbers
            helper = self._helper
            if helper is None or not (helper.alive or helper.unservable):
                helper = self._helper = self._start()
        if not helper.ready.wait(START_SECONDS):
            helper.kill()
            raise GrammarsBusy("the process that compiles grammars does not start; try again")
        return helper, number

    def _start(self) -> _Helper:
        if self._closed:
            raise GrammarsBusy("this process is ending; try again")
        now = time.monotonic()
        if len(self._starts) == STARTS and now - self._starts[0] < START_WINDOW_SECONDS:
            raise GrammarsBusy(
                f"the process that compiles grammars has ended {STARTS} times within a minute; "
                "try again"
            )
        self._starts.append(now)
        return _Helper(self._command, self._setup)


def _key(grammar: Grammar) -> bytes:
    text = f"{grammar.kind}\0{grammar.compact}\0{grammar.param}\0{grammar.source}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _look(grammar: Grammar) -> None:
    """What needs no compiler. Raises ``BadGrammar``."""
    if not grammar.fits():
        raise BadGrammar(
            f"{grammar.param}: has more than {MAX_SOURCE_BYTES} bytes; send a shorter one",
            grammar.param,
        )
    if grammar.kind != "json_schema":
        return
    schema = read_schema(grammar.source, grammar.param)
    if not isinstance(schema, dict):
        raise BadGrammar(f"{grammar.param}: a schema must be an object", grammar.param)


class _Helper:
    """One life of the helper. A thread of its own starts it, hears it and sees its end.

    The kernel ends the helper with the thread that started it, so that thread stays.
    """

    def __init__(self, command: list[str], setup: Setup) -> None:
        self.ready = threading.Event()
        """It has answered, or has ended."""
        self.alive = True
        self.unservable = ""
        self.pid: int | None = None
        self._lock = threading.Lock()
        self._open: dict[int, Future[Verdict | None]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._into = -1
        """Where it listens."""
        self._heard_at = time.monotonic()
        """When it said something last."""
        threading.Thread(
            target=self._live, args=(command, setup), name="grammars", daemon=True
        ).start()

    def ask(self, number: int, grammar: Grammar) -> Verdict | None:
        """``None`` where the helper ended. Raises ``GrammarsBusy`` where no answer comes; a helper
        that answers nobody is killed."""
        future: Future[Verdict | None] = Future()
        asked = time.monotonic()
        with self._lock:
            if not self.alive:
                return None
            self._open[number] = future
            sent = self._send(frame(Ask(number, grammar)))
        try:
            while sent:
                now = time.monotonic()
                silent_at = max(asked, self._heard_at) + SILENCE_SECONDS
                until = min(silent_at, asked + VERDICT_SECONDS)
                if now < until:
                    with contextlib.suppress(TimeoutError):
                        return future.result(until - now)
                elif now < silent_at:
                    raise GrammarsBusy("too many grammars are compiled at once; try again")
                else:
                    break
        finally:
            self._open.pop(number, None)
        self.kill()
        raise GrammarsBusy("the process that compiles grammars does not answer; try again")

    def kill(self) -> None:
        process = self._process
        if process is not None and self.alive:
            process.kill()

    def _send(self, data: bytes) -> bool:
        """Whether all could be written in time; a helper that hangs must hold nobody."""
        into = self._into
        deadline = time.monotonic() + SILENCE_SECONDS
        view = memoryview(data)
        try:
            while view:
                if not select.select([], [into], [], max(0.0, deadline - time.monotonic()))[1]:
                    return False
                view = view[os.write(into, view) :]
        except BlockingIOError:
            return False
        except OSError:  # it has ended; its thread tells who waits
            return True
        return True

    def _live(self, command: list[str], setup: Setup) -> None:
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self.pid = self._process.pid
            into, out = self._process.stdin, self._process.stdout
            if into is None or out is None:
                raise RuntimeError("the helper that compiles grammars has no pipes")
            self._into = into.fileno()
            os.set_blocking(self._into, False)
            if self._send(frame(setup)):
                self._listen(out.fileno())
        finally:
            self._end()

    def _listen(self, out: int) -> None:
        reader = FrameReader()
        while data := os.read(out, _READ):
            self._heard_at = time.monotonic()
            for body in reader.feed(data):
                said = msgspec.msgpack.decode(body, type=Answer)
                if isinstance(said, Verdict):
                    future = self._open.pop(said.number, None)
                    if future is not None:
                        future.set_result(said)
                elif isinstance(said, CannotCompile):
                    self.unservable = said.reason
                elif isinstance(said, Ready):
                    self.ready.set()

    def _end(self) -> None:
        process = self._process
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        with self._lock:
            self.alive = False
            lost, self._open = list(self._open.values()), {}
        self.ready.set()
        for future in lost:
            if not future.done():
                future.set_result(None)


def _default_command() -> list[str]:
    # "-P" keeps the current folder off the module path unless this process itself was found there.
    bare = "" in sys.path or os.getcwd() in sys.path
    return [sys.executable, *([] if bare else ["-P"]), "-m", _MODULE]


__all__ = ["GrammarCheck", "GrammarsBusy", "Verdicts"]
