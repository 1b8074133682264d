"""The helper that vets grammars: ``python -m penstock.services.tokenizer.grammar_process``.

It loads llguidance and the vocabulary once and compiles nothing itself. For each grammar it forks a
child that compiles it under limits of time and memory and says what came out; whatever a grammar
does to the compiler, it does to that child alone.

Frames go over standard input and output: 4 bytes of length, little endian, and one msgpack message.
The first one in is a ``Setup``, the first one out ``Ready`` or ``CannotCompile``; then ``Ask`` in
and ``Verdict`` out, in any order. The helper ends when its input ends.
"""

from __future__ import annotations

import gc
import os
import resource
import selectors
import signal
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from penstock.protocol.grammar.compiler import (
    compile_grammar,
    load_tokenizer,
    no_extension,
    one_line,
    special_token,
)
from penstock.protocol.grammar.json_schema.check import refuse
from penstock.protocol.grammar.request import MAX_SOURCE_BYTES, BadGrammar, Grammar, read_schema
from penstock.protocol.model_info import BadModelFolder
from penstock.protocol.process.parent_death import end_with_parent

if TYPE_CHECKING:
    from llguidance import LLTokenizer


MAX_CHILDREN = 4
CPU_SECONDS = 0.5
"""What a grammar may take of a processor to be compiled and tried."""
WALL_SECONDS = 2.0
"""After so long the child is killed, whoever had the processors. ``MAX_CHILDREN`` that use all of
their ``CPU_SECONDS`` end before, on one core."""
BUSY_SHARE = 0.5
"""A child killed before it had this share of ``CPU_SECONDS`` says nothing about its grammar."""
MEMORY_BYTES = 512 * 1024 * 1024
"""Address space that a child may take beyond the helper's."""
WALK_TOKENS = 24
"""Tokens of a random answer that are followed: a grammar may grow too complex only under way."""
WALK_SECONDS = 0.2
SLOWEST_SECONDS = 0.05
"""A token and the mask after it may take a processor this long; more would hold up a batch."""
SLOW_SECONDS = 0.02
"""The same, on the average of the tokens followed. Ordinary grammars take 0.01 to 1 ms."""
MAX_FRAME = 4 * MAX_SOURCE_BYTES + 1024
_LENGTH = struct.Struct("<I")
_READ = 1 << 16


class Setup(msgspec.Struct, frozen=True, array_like=True):
    """The model whose tokens the grammars are compiled for."""

    folder: str
    """The folder of the checkpoint."""
    vocab_size: int
    ends: list[int]
    parent: int
    """Process id of the asker; the helper ends with it."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    pass


class CannotCompile(msgspec.Struct, frozen=True, array_like=True, tag="unservable"):
    """No grammar can be compiled for this model."""

    reason: str


class Ask(msgspec.Struct, frozen=True, array_like=True):
    number: int
    grammar: Grammar


class Verdict(msgspec.Struct, frozen=True, array_like=True, tag="verdict"):
    number: int
    reason: str | None
    """Why the grammar is refused; ``None``: it is fine."""
    final: bool = True
    """False: nothing is known about the grammar, there was no time for it."""


Answer = Ready | CannotCompile | Verdict


def frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that are complete. Raises ``ValueError`` for one that is too long."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME:
                raise ValueError(f"a frame of {length} bytes; at most {MAX_FRAME}")
            if len(self._buffer) < _LENGTH.size + length:
                return
            body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
            del self._buffer[: _LENGTH.size + length]
            yield body


class _Child:
    def __init__(self, number: int, pid: int, pipe: int, param: str) -> None:
        self.number, self.pid, self.pipe, self.param = number, pid, pipe, param
        self.deadline = time.monotonic() + WALL_SECONDS
        self.said = bytearray()


class Helper:
    """The loop: takes asks, keeps at most ``MAX_CHILDREN`` children, passes verdicts on."""

    def __init__(self, vocabulary: LLTokenizer, asks: int, answers: int) -> None:
        self._vocabulary, self._asks, self._answers = vocabulary, asks, answers
        self._reader = FrameReader()
        self._waiting: deque[Ask] = deque()
        self._children: dict[int, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(asks, selectors.EVENT_READ)

    def run(self) -> None:
        """Run until the input ends; children under way end with this process."""
        while True:
            deadline = min((c.deadline for c in self._children.values()), default=None)
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            for key, _ in self._selector.select(timeout):
                if key.fd != self._asks:
                    self._hear(self._children[key.fd])
                    continue
                data = os.read(self._asks, _READ)
                if not data:
                    return
                for body in self._reader.feed(data):
                    self._waiting.append(msgspec.msgpack.decode(body, type=Ask))
            now = time.monotonic()
            for child in [c for c in self._children.values() if c.deadline <= now]:
                os.kill(child.pid, signal.SIGKILL)
                self._finish(child)
            while self._waiting and len(self._children) < MAX_CHILDREN:
                self._fork(self._waiting.popleft())

    def _fork(self, ask: Ask) -> None:
        out, into = os.pipe()
        own = os.getpid()
        pid = os.fork()
        if pid == 0:
            _vet(ask.grammar, self._vocabulary, into, own)
        os.close(into)
        self._children[out] = _Child(ask.number, pid, out, ask.grammar.param)
        self._selector.register(out, selectors.EVENT_READ)

    def _hear(self, child: _Child) -> None:
        data = os.read(child.pipe, _READ)
        child.said += data
        if not data:
            self._finish(child)

    def _finish(self, child: _Child) -> None:
        del self._children[child.pipe]
        self._selector.unregister(child.pipe)
        os.close(child.pipe)
        _, status, usage = os.wait4(child.pid, 0)
        verdict = _verdict(child, status, usage.ru_utime + usage.ru_stime)
        _write(self._answers, frame(verdict))


def _verdict(child: _Child, status: int, cpu: float) -> Verdict:
    """What a child said, or what its death says."""
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0 and child.said:
        reason = child.said.decode()[1:]
        return Verdict(child.number, reason or None)
    ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    late = ended in (signal.SIGPROF, signal.SIGXCPU, signal.SIGKILL)
    if late and cpu < BUSY_SHARE * CPU_SECONDS and time.monotonic() >= child.deadline:
        return Verdict(child.number, "there was no time to compile it; try again", final=False)
    if late:
        reason = f"it takes more than {CPU_SECONDS:g} s to compile; ask for something simpler"
    else:
        reason = (
            f"compiling it takes more than {MEMORY_BYTES // 1024**2} MiB or breaks the compiler; "
            "ask for something simpler"
        )
    return Verdict(child.number, f"{child.param}: {reason}")


def _vet(grammar: Grammar, vocabulary: LLTokenizer, answer: int, parent: int) -> NoReturn:
    """The whole life of a child: says ``!`` and why the grammar is refused, or ``!`` alone."""
    code = 1
    try:
        end_with_parent(parent)
        _confine()
        try:
            walk(grammar, vocabulary)
            reason = ""
        except BadGrammar as error:
            reason = error.message
        except MemoryError:
            os._exit(code)
        _write(answer, b"!" + reason.encode(errors="replace"))
        code = 0
    finally:
        os._exit(code)


def _confine() -> None:
    """Limits that nothing in this process can lift: processor time, memory, no core file."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    space = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (1, 2))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)


def walk(grammar: Grammar, vocabulary: LLTokenizer) -> None:
    """Compile a grammar and follow a random answer for a while. Raises ``BadGrammar``.

    An answer that runs into a dead end is no reason to refuse: few tokens lead there.
    """
    if grammar.kind == "json_schema":
        reason = refuse(read_schema(grammar.source, grammar.param))
        if reason is not None:
            raise BadGrammar(f"{grammar.param}: the schema: {reason}", grammar.param)
    matcher = compile_grammar(grammar, vocabulary)
    taken: list[float] = []
    state = 1
    while len(taken) < WALK_TOKENS and sum(taken) < WALK_SECONDS and not matcher.is_stopped():
        before = time.process_time()
        state = state * 6364136223846793005 % 2**64
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        matcher.consume_token(_pick(mask, state))
        taken.append(time.process_time() - before)
    if taken and (max(taken) > SLOWEST_SECONDS or sum(taken) > SLOW_SECONDS * len(taken)):
        raise BadGrammar(
            f"{grammar.param}: to check one token of an answer takes up to "
            f"{1000 * max(taken):.0f} ms; ask for something simpler, or less ambiguous",
            grammar.param,
        )
    if matcher.is_error() and (taken_for := special_token(matcher.get_error())) is not None:
        raise BadGrammar(
            f"{grammar.param}: it spells {vocabulary.decode_str([taken_for])!r}, a special token "
            "of this model, in a way that cannot be told from that token; write the text as it "
            "is, without classes or groups of characters in it",
            grammar.param,
        )
    if matcher.is_error() and not no_extension(matcher.get_error()):
        raise BadGrammar(
            f"{grammar.param}: it grows too complex while an answer is followed: "
            f"{one_line(matcher.get_error())}",
            grammar.param,
        )


def _pick(mask: int, state: int) -> int:
    """One of the bits that are set, from a place that ``state`` chooses."""
    start = (state >> 33) % mask.bit_length()
    above = mask >> start
    return start + (above & -above).bit_length() - 1


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _first(asks: int, reader: FrameReader) -> Setup | None:
    while data := os.read(asks, _READ):
        for body in reader.feed(data):
            return msgspec.msgpack.decode(body, type=Setup)
    return None


def main() -> int:
    from setproctitle import setproctitle

    setproctitle("penstock: grammars")
    asks, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # whatever a library prints is no frame
    setup = _first(asks, FrameReader())
    if setup is None:
        return 0
    end_with_parent(setup.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent decides when it ends
    try:
        vocabulary = load_tokenizer(Path(setup.folder), setup.vocab_size, setup.ends)
    except BadModelFolder as error:
        _write(answers, frame(CannotCompile(str(error)[:1000])))
        return 1
    gc.collect()
    gc.freeze()
    _write(answers, frame(Ready()))
    Helper(vocabulary, asks, answers).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
