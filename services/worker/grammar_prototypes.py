"""Compiled grammars, kept to be copied by the rows that follow them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from penstock.protocol.grammar.request import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_PROTOTYPES = 128
"""One for each family of a grammar. What matchers find out stays there, up to some 40 MB."""
MAX_PROTOTYPE_BYTES = 4 * 1024 * 1024
"""Bytes of all grammars' sources, at most; a compiled one may take ten times its source or more."""
MAX_COPIES = 1000
"""Copies of a prototype, at most: then it is compiled anew, and what it found out is forgotten."""

_Key = tuple[str, bool, str, bool, int]


def _key(grammar: Grammar, family: int) -> _Key:
    return grammar.kind, grammar.compact, grammar.source, grammar.padded, family


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

        The first thread that wants a grammar compiles it, the others wait for that, unless another
        family has it.
        """
        key = _key(grammar, family)
        with self._lock:
            if key not in self._made and (found := self._in_another_family(key)) is not None:
                return found.deep_copy()
            self._copies[key] = self._copies.get(key, 0) + 1
            if self._copies[key] > MAX_COPIES:
                self._forget(key)
            future = self._made.get(key)
            own = self._enter(key) if future is None else None
            if future is not None:
                self._made.move_to_end(key)
        if own is not None:
            self._fulfil(key, own, grammar)
        made: Future[LLMatcher] = own or future  # type: ignore[assignment]  # one of them is
        return made.result().deep_copy()

    def make(self, grammar: Grammar, family: int) -> None:
        """Compile a grammar that this family does not have, for those who come later."""
        key = _key(grammar, family)
        with self._lock:
            if key in self._made:
                return
            own: Future[LLMatcher] = self._enter(key)
        self._fulfil(key, own, grammar)

    def has(self, grammar: Grammar, family: int) -> bool:
        return _key(grammar, family) in self._made

    def _in_another_family(self, key: _Key) -> LLMatcher | None:
        for other, future in self._made.items():
            if other[:-1] == key[:-1] and future.done() and future.exception() is None:
                return future.result()
        return None

    def _enter(self, key: _Key) -> Future[LLMatcher]:
        """A place for what is about to be compiled. The lock is held."""
        own: Future[LLMatcher] = Future()
        self._made[key] = own
        self._copies[key] = 1
        self.size += len(key[2])
        self._shrink()
        return own

    def _fulfil(self, key: _Key, own: Future[LLMatcher], grammar: Grammar) -> None:
        try:
            own.set_result(self._compile(grammar))
        except BaseException as error:
            with self._lock:
                self._forget(key)
            own.set_exception(error)

    def _shrink(self) -> None:
        while len(self._made) > 1 and (
            len(self._made) > self._entries or self.size > self._max_size
        ):
            self._forget(next(iter(self._made)))

    def _forget(self, key: _Key) -> None:
        self._copies.pop(key, None)
        if self._made.pop(key, None) is not None:
            self.size -= len(key[2])
