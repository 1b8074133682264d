"""The grammar of one slot: its matcher, and the tokens that the matcher has still to see."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.protocol.grammar.request import BadGrammar, Grammar
from penstock.protocol.wire.messages.steps import TOO_EARLY

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask = npt.NDArray[np.int32]


class Failure(NamedTuple):
    """Why a row ends."""

    reason: str
    status: int = 400
    """HTTP status: 400 where the grammar is to blame, 503 where it is the server."""


NOT_YET = Failure("its grammar is not compiled yet", TOO_EARLY)
"""The failure of a row that may be tried again."""


class GrammarSlot:
    """One slot's grammar. Its matcher is touched only by the job that fills masks."""

    def __init__(
        self, grammar: Grammar, output: Sequence[int], least: int, ends: Mask | None
    ) -> None:
        self.starts = frozenset(grammar.starts_after())
        """The answer is free until one of these has come; empty: it has."""
        self.opening = int.from_bytes(grammar.may_open, "little") if grammar.may_open else -1
        """The token that an answer may begin with, to be free for a while; -1: none."""
        self.may_end = grammar.may_end
        self.family = 0
        self.count = 0
        self.least, self.ends = least, ends
        self.tokens: list[int] = []
        """Tokens of the answer that the matcher has not seen."""
        self.matcher: LLMatcher | None = None
        self.making: Future[LLMatcher] | None = None
        self.spare: Future[None] | None = None
        """Compiles the grammar for its family, where ``making`` may copy another one's."""
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

    def ready(self, until: float) -> LLMatcher | None:
        """The matcher; ``None`` with ``failure`` set where there is none by this time. The token
        that such a row gets is not the answer's: the failure stays."""
        if self.matcher is None and self.failure is None and self.making is not None:
            try:
                self.matcher = self.making.result(max(0.0, until - time.monotonic()))
            except TimeoutError:
                self.failure = NOT_YET
            except BadGrammar as error:
                self.failure = Failure(error.message)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # llguidance's panics do not derive from Exception
                reason = f"the grammar cannot be compiled: {type(error).__name__}: {error}"
                self.failure = Failure(reason, 503)
        return None if self.failure is not None else self.matcher
