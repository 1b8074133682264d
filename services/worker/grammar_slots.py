"""The grammars of a worker's slots: which tokens may come next, computed in threads of the host.

A slot takes a grammar (``begin``), hears of its tokens (``took``) and has its mask filled
(``start``, then ``wait``), while the caller runs the forward pass. Masks take no lock of the
interpreter, and compiling takes it for a small part of its time; llguidance's objects are touched
by one thread at a time. Nothing here knows torch.

A mask is a bitmask, 32 tokens an int32: token t is bit t % 32 of word t // 32.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.protocol.grammar import BadGrammar, Grammar
from penstock.protocol.grammar_compiler import compile_grammar, one_line

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

MAX_PROTOTYPES = 128
"""One for each family of a grammar. What matchers find out stays there, up to some 40 MB."""
MAX_PROTOTYPE_BYTES = 4 * 1024 * 1024
"""Of grammars' sources; what is compiled from one may take ten times as much, or more."""
MAX_COPIES = 1000
"""Of a prototype: then it is compiled anew, and what it found out is forgotten."""
COMPILE_SECONDS = 5.0
"""A grammar, whose vetting took less than one second, must be compiled so soon after it has got its
slot; no step waits longer."""
SLOW_SECONDS = 0.1
"""Of a processor, for one row's token and mask. Ordinary ones take 0.01 to 1 ms; vetting refuses
those that take half of this at their beginning, but some grow slow under way."""
MAX_SLOW = 3
"""A row ends after so many slow masks."""
WATCHED_FILLS = 16
"""After a slow fill so many are done row by row, to see whose fault it is."""
MIN_PARALLEL = 32
"""Fewer tokens are fed one by one: under 1 µs each, where waking threads takes 15."""

Mask = npt.NDArray[np.int32]


class Failure(NamedTuple):
    """Why a row ends."""

    reason: str
    status: int = 400
    """HTTP status: 400 where the grammar is to blame, 503 where it is the server."""


_Key = tuple[str, bool, str, int]


class Prototypes:
    """Compiled grammars at their beginning, to be copied; the latest ones used.

    What a matcher finds out about a grammar while it makes masks it shares with its copies, under
    a lock: copies of one make no masks at the same time. So there are *families*, compiled apart,
    as many as threads; the rows of a family learn from each other, and families do not wait.
    """

    def __init__(
        self,
        compile: Callable[[Grammar], LLMatcher],
        entries: int = MAX_PROTOTYPES,
        size: int = MAX_PROTOTYPE_BYTES,
    ) -> None:
        self._compile, self._entries, self._max_size = compile, entries, size
        self._made: OrderedDict[_Key, Future[LLMatcher]] = OrderedDict()
        self._copies: dict[_Key, int] = {}
        self._lock = threading.Lock()
        self.size = 0
        """Characters of the sources kept."""

    def __len__(self) -> int:
        return len(self._made)

    def copy(self, grammar: Grammar, family: int = 0) -> LLMatcher:
        """A matcher of its own. Raises ``BadGrammar``; may be called from several threads.

        The first thread that wants a grammar compiles it, the others wait for that.
        """
        key = (grammar.kind, grammar.compact, grammar.source, family)
        with self._lock:
            self._copies[key] = self._copies.get(key, 0) + 1
            if self._copies[key] > MAX_COPIES:
                self._forget(key)
            future = self._made.get(key)
            own: Future[LLMatcher] | None = Future() if future is None else None
            if own is not None:
                future = self._made[key] = own
                self._copies[key] = 1
                self.size += len(grammar.source)
                self._shrink()
            else:
                self._made.move_to_end(key)
        if own is not None:
            try:
                own.set_result(self._compile(grammar))
            except BaseException as error:
                with self._lock:
                    self._forget(key)
                own.set_exception(error)
        made: Future[LLMatcher] = own or future  # type: ignore[assignment]  # one of them is
        return made.result().deep_copy()

    def _shrink(self) -> None:
        while len(self._made) > 1 and (
            len(self._made) > self._entries or self.size > self._max_size
        ):
            self._forget(next(iter(self._made)))

    def _forget(self, key: _Key) -> None:
        self._copies.pop(key, None)
        if self._made.pop(key, None) is not None:
            self.size -= len(key[2])


class _Slot:
    """One slot's grammar. Its matcher is touched only by the job that fills masks."""

    def __init__(
        self, grammar: Grammar, output: Sequence[int], least: int, ends: Mask | None
    ) -> None:
        self.starts = frozenset(grammar.starts_after())
        """The answer is free until one of these has come; empty: it has."""
        self.opening = int.from_bytes(grammar.may_open, "little") if grammar.may_open else -1
        """The token that an answer may begin with, to be free for a while; -1: none."""
        self.family = 0
        self.count = 0
        self.least, self.ends = least, ends
        self.tokens: list[int] = []
        """Tokens of the answer that the matcher has not seen."""
        self.matcher: LLMatcher | None = None
        self.making: Future[LLMatcher] | None = None
        self.due = time.monotonic() + COMPILE_SECONDS
        """When the matcher must be there."""
        self.failure: Failure | None = None
        self.slow = 0
        for token in output:
            self.take(token)

    def take(self, token: int) -> None:
        self.count += 1
        if self.opening >= 0:
            if token != self.opening:
                self.starts = frozenset()
            self.opening = -1
            if self.starts:
                return
        if not self.starts:
            self.tokens.append(token)
        elif token in self.starts:
            self.starts = frozenset()

    @property
    def free(self) -> bool:
        """Whether the next token may be any."""
        return bool(self.starts) and self.opening < 0

    def ready(self) -> LLMatcher | None:
        """The matcher; ``None`` with ``failure`` set where there is none."""
        if self.matcher is None and self.failure is None and self.making is not None:
            try:
                self.matcher = self.making.result(max(0.0, self.due - time.monotonic()))
            except TimeoutError:
                reason = f"the grammar was not compiled within {COMPILE_SECONDS:g} s; try again"
                self.failure = Failure(reason, 503)
            except BadGrammar as error:
                self.failure = Failure(error.message)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # llguidance's panics do not derive from Exception
                reason = f"the grammar cannot be compiled: {type(error).__name__}: {error}"
                self.failure = Failure(reason, 503)
        return None if self.failure is not None else self.matcher


_Held = tuple[int, _Slot, "LLMatcher"]
"""A row whose mask a matcher fills."""


class GrammarSlots:
    """The grammars of every slot of one executor. All methods belong to one thread."""

    def __init__(
        self,
        slots: int,
        vocab_size: int,
        load_tokenizer: Callable[[], LLTokenizer],
        threads: int,
    ) -> None:
        """``load_tokenizer`` is called once, in a thread; ``threads`` compute masks."""
        self._slots: list[_Slot | None] = [None] * slots
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // 32)
        self._all = self.mask(range(vocab_size))
        self._without_ends: Mask | None = None
        self._load, self._threads = load_tokenizer, max(1, threads)
        self._tokenizer: Future[LLTokenizer] | None = None
        self._compilers = ThreadPoolExecutor(max(1, threads), "grammar")
        self._filler = ThreadPoolExecutor(1, "masks")
        self._executor: LLExecutor | None = None
        self._prototypes = Prototypes(self._compiled)
        self._filling: Future[dict[int, Failure]] | None = None
        self._watched = 0
        """Fills that are still done row by row."""

    # --- slots

    def prepare(self) -> Future[LLTokenizer]:
        """Have the vocabulary read, in a thread. llguidance holds the interpreter meanwhile, so the
        best time is before the first step."""
        if self._tokenizer is None:
            self._tokenizer = self._filler.submit(self._load)
        return self._tokenizer

    def begin(
        self,
        slot: int,
        grammar: Grammar,
        output: Sequence[int],
        min_tokens: int = 0,
        ends: Sequence[int] = (),
    ) -> None:
        """A sequence with a grammar takes a slot; returns at once.

        Args:
            output: tokens that it has produced so far.
            min_tokens: none of ``ends`` is allowed before so many output tokens, as long as the
                grammar allows anything else.
        """
        kept = ~self.mask(ends) if min_tokens and len(ends) else None
        taken = _Slot(grammar, output, min_tokens, kept)
        self.prepare()
        taken.family = slot % self._threads
        taken.making = self._compilers.submit(self._prototypes.copy, grammar, taken.family)
        self._slots[slot] = taken

    def forget(self, slot: int) -> None:
        """The slot has no grammar from here on, if it had one."""
        taken, self._slots[slot] = self._slots[slot], None
        if taken is not None and taken.making is not None:
            taken.making.cancel()

    def has(self, slot: int) -> bool:
        return self._slots[slot] is not None

    def took(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """The sampled tokens of these slots; those without a grammar are passed over.

        The matchers see them when the next masks are filled.
        """
        for slot, token in zip(slots, tokens, strict=True):
            taken = self._slots[slot]
            if taken is not None:
                taken.take(token)

    def opening(self, slot: int) -> int:
        """The token that may come first in this slot though no mask has it; -1: none.

        An answer that begins with it is free for a while. It is for the caller to see whether the
        model means to: among the tokens that fit, it would come too often.
        """
        taken = self._slots[slot]
        return -1 if taken is None else taken.opening

    # --- masks

    def start(self, slots: Sequence[int], out: Mask) -> None:
        """Fill the masks of these slots' next tokens, in threads; then call ``wait``.

        Args:
            out: [n, ceil(V / 32)] int32, contiguous: a row for each slot. A slot without a grammar
                gets every token. Bits past the vocabulary are 0.

        ``out``, ``took`` and ``begin`` are not to be used until ``wait`` has returned.
        """
        rows = self._rows(slots, out)
        self._filling = self._filler.submit(self._fill, rows, out)

    def fill(self, slots: Sequence[int], out: Mask) -> dict[int, Failure]:
        """``start`` and ``wait`` in one, for a caller that has nothing else to do meanwhile."""
        return self._fill(self._rows(slots, out), out)

    def _rows(self, slots: Sequence[int], out: Mask) -> list[_Slot | None]:
        if self._filling is not None:
            raise RuntimeError("masks are being filled: call wait first")
        shape = (len(slots), self._words)
        if out.shape != shape or out.dtype != np.int32 or not out.flags.c_contiguous:
            raise ValueError(f"the masks must be contiguous int32 {shape}, got {out.shape}")
        return [self._slots[slot] for slot in slots]

    def wait(self) -> dict[int, Failure]:
        """Wait for the masks. Returns the rows whose grammar has failed, each with the reason.

        Such a row allows every token, so that it can be drawn and then ended with an error.
        """
        filling, self._filling = self._filling, None
        return {} if filling is None else filling.result()

    def mask(self, tokens: Sequence[int]) -> Mask:
        """The bitmask of these token ids, [ceil(V / 32)]."""
        bits = np.zeros(32 * self._words, np.uint8)
        bits[np.asarray(tokens, np.int64)] = 1
        return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)

    def close(self) -> None:
        """End the threads."""
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._filler.shutdown(wait=False, cancel_futures=True)

    # --- in the threads

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        return compile_grammar(grammar, self.prepare().result())

    def _fill(self, rows: list[_Slot | None], out: Mask) -> dict[int, Failure]:
        held: list[_Held] = []
        for row, slot in enumerate(rows):
            matcher = None if slot is None or slot.free else slot.ready()
            if slot is not None and matcher is not None:
                held.append((row, slot, matcher))
            else:
                out[row] = self._all if slot is None else self._endless(slot)
        if held and self._watched:
            self._watched -= 1
            for one in held:
                self._watch(one, out)
        elif held:
            began = time.monotonic()
            self._guarded(held, out)
            if time.monotonic() - began > SLOW_SECONDS:
                self._watched = WATCHED_FILLS
        for _, slot, matcher in held:
            if slot.failure is None and matcher.is_error():
                reason = one_line(matcher.get_error())
                slot.failure = Failure(f"the grammar cannot go on: {reason}")
            elif slot.slow >= MAX_SLOW:
                limit = f"{1000 * SLOW_SECONDS:.0f} ms"
                slot.failure = Failure(f"the grammar takes more than {limit} for a token")
        failed: dict[int, Failure] = {}
        for row, taken in enumerate(rows):
            if taken is None:
                continue
            if taken.failure is not None:
                failed[row] = taken.failure
                out[row] = self._all
            elif taken.ends is not None and taken.count < taken.least:
                without = out[row] & taken.ends
                if without.any():
                    out[row] = without
        return failed

    def _guarded(self, held: list[_Held], out: Mask) -> None:
        """Feed and fill; where that raises, these rows fail, and no others."""
        try:
            self._feed(held)
            self._compute(held, out)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # llguidance's panics do not derive from Exception
            for _, slot, _ in held:
                slot.failure = Failure(f"the masks failed: {type(error).__name__}: {error}", 503)

    def _endless(self, slot: _Slot) -> Mask:
        """Every token but the model's ends: a grammar that waits must be reached."""
        if self._without_ends is None and slot.failure is None:
            try:
                self._without_ends = self._all & ~self.mask(self.prepare().result().eos_tokens)
            except Exception as error:
                slot.failure = Failure(f"the vocabulary cannot be read: {error}", 503)
        return self._all if self._without_ends is None else self._without_ends

    def _feed(self, held: list[_Held]) -> None:
        """Show the matchers what has come since."""
        single = [(m, slot.tokens[0]) for _, slot, m in held if len(slot.tokens) == 1]
        if len(single) >= MIN_PARALLEL:
            self._pool().consume_token_par(single)
        else:
            for matcher, token in single:
                matcher.consume_token(token)
        for _, slot, matcher in held:
            if len(slot.tokens) > 1:
                matcher.consume_tokens(slot.tokens)
            slot.tokens = []

    def _compute(self, held: list[_Held], out: Mask) -> None:
        # Threads take stretches of the list: one family to a thread.
        ordered = sorted(held, key=lambda one: one[1].family)
        matchers = [(matcher, row) for row, _, matcher in ordered]
        self._pool().unsafe_compute_mask_ptr(matchers, out.ctypes.data, 4 * self._words, len(out))

    def _watch(self, one: _Held, out: Mask) -> None:
        """One row alone: it is computed in this thread, whose time is measured."""
        began = time.thread_time()
        self._guarded([one], out)
        if time.thread_time() - began > SLOW_SECONDS:
            one[1].slow += 1
            self._watched = WATCHED_FILLS

    def _pool(self) -> LLExecutor:
        from llguidance import LLExecutor

        if self._executor is None:
            self._executor = LLExecutor(self._threads)
        return self._executor
