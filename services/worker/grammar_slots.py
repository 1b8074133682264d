"""The grammars of a worker's slots: which tokens may come next, computed in threads of the host.

A slot takes a grammar (``begin``), hears of its tokens (``took``) and has its mask filled
(``start``, then ``wait``), while the caller runs the forward pass. Masks take no lock of the
interpreter, and compiling takes it for a small part of its time; llguidance's objects are touched
by one thread at a time. Nothing here knows torch.

A mask is a bitmask, 32 tokens an int32: token t is bit t % 32 of word t // 32.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from penstock.protocol.grammar.compiler import compile_grammar, one_line
from penstock.protocol.grammar.request import Grammar
from penstock.services.worker.grammar_prototypes import Prototypes
from penstock.services.worker.grammar_slot import NOT_YET, Failure, GrammarSlot, Mask

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

__all__ = ["NOT_YET", "Failure", "GrammarSlots", "Mask"]
PATIENCE_SECONDS = 0.002
"""A step waits this long for all grammars together that are not compiled yet. Most are by then; the
rows of the others have no token in it."""
SLOW_SECONDS = 0.1
"""A mask is slow if it takes a processor longer than this, its row's token included. Ordinary ones
take 0.01 to 1 ms; vetting refuses grammars that take half of this at their beginning, but some grow
slow under way."""
MAX_SLOW = 3
"""Slow masks after which a row ends."""
WATCHED_FILLS = 16
"""Fills that are done row by row after a slow one, to see whose fault it is."""
MIN_PARALLEL = 32
"""Fewer tokens are fed one by one: under 1 µs each, where waking threads takes 15."""

_Held = tuple[int, GrammarSlot, "LLMatcher", Sequence[int]]
"""A row whose mask a matcher fills, and drafts whose masks stand behind it."""


class GrammarSlots:
    """The grammars of every slot of one executor. All methods belong to one thread."""

    def __init__(
        self,
        slots: int,
        vocab_size: int,
        load_tokenizer: Callable[[], LLTokenizer],
        threads: int,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        """``load_tokenizer`` is called once, in a thread; ``threads`` compute masks; ``patience``:
        seconds that masks wait for grammars that are not compiled yet."""
        self._slots: list[GrammarSlot | None] = [None] * slots
        self._patience = patience
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // 32)
        self._all = self.mask(range(vocab_size))
        self._without_ends: Mask | None = None
        self._ends: Mask | None = None
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
            self._tokenizer = self._compilers.submit(self._load)
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
        taken = GrammarSlot(grammar, output, min_tokens, kept)
        self.prepare()
        taken.family = slot % self._threads
        known = self._prototypes.has(grammar, taken.family)
        taken.making = self._compilers.submit(self._prototypes.copy, grammar, taken.family)
        if not known:
            taken.spare = self._compilers.submit(self._prototypes.make, grammar, taken.family)
        self._slots[slot] = taken

    def fail(self, slot: int, reason: str) -> None:
        """A sequence takes a slot whose grammar cannot be followed: its row ends."""
        taken = GrammarSlot(Grammar("regex"), [], 0, None)
        taken.failure = Failure(reason, 503)
        self._slots[slot] = taken

    def forget(self, slot: int) -> None:
        """The slot has no grammar from here on, if it had one."""
        taken, self._slots[slot] = self._slots[slot], None
        if taken is None or taken.failure is NOT_YET:
            return  # its sequence comes back, and finds the grammar compiled
        for job in (taken.making, taken.spare):
            if job is not None:
                job.cancel()

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

    # --- drafts

    def guides(self, slot: int) -> bool:
        """Whether a grammar says by now what may come next in a slot, or it has none."""
        taken = self._slots[slot]
        if taken is None:
            return True
        ready = taken.matcher is not None and taken.failure is None
        return ready and not taken.free and taken.opening < 0

    def forced(self, slot: int, most: int) -> list[int]:
        """The next tokens of a slot, up to ``most``, where its grammar leaves no choice of text."""
        matcher = self._shown(slot)
        if matcher is None:
            return []
        try:
            tokens: list[int] = matcher.compute_ff_tokens()[:most]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # llguidance's panics do not derive from Exception
            self._broken(slot, error)
            return []
        return tokens

    def fitting(self, slot: int, tokens: list[int]) -> list[int]:
        """The first of these tokens, as many as the slot's grammar allows to come next."""
        matcher = self._shown(slot)
        if matcher is None:
            return tokens
        try:
            return tokens[: matcher.validate_tokens(tokens)]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self._broken(slot, error)
            return []

    def _shown(self, slot: int) -> LLMatcher | None:
        """The matcher of a slot, which has seen all tokens; ``None``: none is at work there."""
        taken = self._slots[slot]
        if taken is None or taken.free or taken.failure is not None or taken.matcher is None:
            return None
        if taken.tokens:
            try:
                self._feed([(0, taken, taken.matcher, ())])
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                self._broken(slot, error)
        return taken.matcher if taken.failure is None and not taken.matcher.is_error() else None

    def _broken(self, slot: int, error: BaseException) -> None:
        taken = self._slots[slot]
        if taken is not None:
            taken.failure = Failure(f"the grammar failed: {type(error).__name__}: {error}", 503)

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

    def fill(
        self, slots: Sequence[int], out: Mask, drafts: Sequence[Sequence[int]] = ()
    ) -> dict[int, Failure]:
        """``start`` and ``wait`` in one, for a caller that has nothing else to do meanwhile.

        drafts: of each slot, tokens that may come next. Behind the slot's mask stand as many more:
        what may follow each of them; behind one that its grammar does not allow, anything.
        """
        return self._fill(self._rows(slots, out, sum(map(len, drafts))), out, drafts)

    def _rows(self, slots: Sequence[int], out: Mask, more: int = 0) -> list[GrammarSlot | None]:
        """more: rows beside those of the slots."""
        if self._filling is not None:
            raise RuntimeError("masks are being filled: call wait first")
        shape = (len(slots) + more, self._words)
        if out.shape != shape or out.dtype != np.int32 or not out.flags.c_contiguous:
            raise ValueError(f"the masks must be contiguous int32 {shape}, got {out.shape}")
        return [self._slots[slot] for slot in slots]

    def wait(self) -> dict[int, Failure]:
        """Wait for the masks. Returns the rows whose grammar has failed, each with the reason, or
        is not compiled yet (``NOT_YET``).

        Such a row allows every token, so that it can be drawn and then be left out.
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

    def _fill(
        self, rows: list[GrammarSlot | None], out: Mask, drafts: Sequence[Sequence[int]] = ()
    ) -> dict[int, Failure]:
        held: list[_Held] = []
        until = time.monotonic() + self._patience
        drafts = drafts or [()] * len(rows)
        begins = list(accumulate((1 + len(each) for each in drafts), initial=0))
        for row, slot, draft in zip(begins[:-1], rows, drafts, strict=True):
            matcher = None if slot is None or slot.free else slot.ready(until)
            masks = out[row : row + 1 + len(draft)]
            if slot is not None and matcher is not None:
                if draft:
                    masks[1:] = self._ends_alone()  # stays behind a draft that ends the answer
                held.append((row, slot, matcher, draft))
            elif slot is None or (slot.may_end and slot.failure is None):
                masks[:] = self._all
            else:
                masks[:] = self._endless(slot, until)
        if held and self._watched:
            self._watched -= 1
            for one in held:
                self._watch(one, out)
        elif held:
            began = time.monotonic()
            self._guarded(held, out)
            if time.monotonic() - began > SLOW_SECONDS:
                self._watched = WATCHED_FILLS
        for _, slot, matcher, _ in held:
            _find_failure(slot, matcher)
        failed: dict[int, Failure] = {}
        for number, (row, taken) in enumerate(zip(begins[:-1], rows, strict=True)):
            if taken is None:
                continue
            masks = out[row : begins[number + 1]]
            if taken.failure is not None:
                failed[number] = taken.failure
                masks[:] = self._all
            elif taken.ends is not None:
                for mask in masks[: max(0, taken.least - taken.count)]:
                    without = mask & taken.ends
                    if without.any():
                        mask[:] = without
        return failed

    def _guarded(self, held: list[_Held], out: Mask) -> None:
        """Feed and fill; where that raises, these rows fail, and no others."""
        try:
            self._feed(held)
            self._compute(held, out)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # llguidance's panics do not derive from Exception
            for _, slot, _, _ in held:
                slot.failure = Failure(f"the masks failed: {type(error).__name__}: {error}", 503)

    def _ends_alone(self) -> Mask:
        """The model's ends, which alone may follow the end of an answer. The vocabulary is read."""
        if self._ends is None:
            self._ends = self.mask(self.prepare().result().eos_tokens)
        return self._ends

    def _endless(self, slot: GrammarSlot, until: float) -> Mask:
        """Every token but the model's ends: a grammar that waits must be reached."""
        if self._without_ends is None and slot.failure is None:
            try:
                vocabulary = self.prepare().result(max(0.0, until - time.monotonic()))
                self._without_ends = self._all & ~self.mask(vocabulary.eos_tokens)
            except TimeoutError:
                slot.failure = NOT_YET
            except Exception as error:
                slot.failure = Failure(f"the vocabulary cannot be read: {error}", 503)
        return self._all if self._without_ends is None else self._without_ends

    def _feed(self, held: list[_Held]) -> None:
        """Show the matchers what has come since."""
        single = [(m, slot.tokens[0]) for _, slot, m, _ in held if len(slot.tokens) == 1]
        if len(single) >= MIN_PARALLEL:
            self._pool().consume_token_par(single)
        else:
            for matcher, token in single:
                matcher.consume_token(token)
        for _, slot, matcher, _ in held:
            if len(slot.tokens) > 1:
                matcher.consume_tokens(slot.tokens)
            slot.tokens = []

    def _compute(self, held: list[_Held], out: Mask) -> None:
        # Threads take stretches of the list: one family to a thread.
        ordered = sorted(held, key=lambda one: one[1].family)
        pool, place = self._pool(), (out.ctypes.data, 4 * self._words, len(out))
        if alone := [(matcher, row) for row, _, matcher, draft in ordered if not draft]:
            pool.unsafe_compute_mask_ptr(alone, *place)
        if drafted := [(matcher, row, [*draft]) for row, _, matcher, draft in ordered if draft]:
            pool.unsafe_compute_mask_ptr_with_draft_token(drafted, *place)

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


def _find_failure(slot: GrammarSlot, matcher: LLMatcher) -> None:
    """Whether a slot whose mask was filled cannot go on."""
    if slot.failure is None and matcher.is_error():
        reason = one_line(matcher.get_error())
        slot.failure = Failure(f"the grammar cannot go on: {reason}")
    elif slot.slow >= MAX_SLOW:
        limit = f"{1000 * SLOW_SECONDS:.0f} ms"
        slot.failure = Failure(f"the grammar takes more than {limit} for a token")
