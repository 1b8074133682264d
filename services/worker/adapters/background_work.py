"""Work that a thread of its own does, one piece after another, while steps are computed."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

import torch

Asked = TypeVar("Asked")
Done = TypeVar("Done")

SLOW_SECONDS = 5.0
"""Behind a piece that takes longer than this another thread begins the next one."""
MOST_STUCK = 4
"""Threads that there are at the same time, those that are stuck among them."""


@dataclass(slots=True, eq=False)
class _Piece(Generic[Asked]):
    asked: Asked
    seconds: float
    since: float
    """When it was asked for, or when the last piece ahead of it ended."""
    began: float = math.inf


class _Turn(Generic[Asked]):
    """A thread's part in the work."""

    def __init__(self) -> None:
        self.piece: _Piece[Asked] | None = None
        """What it does now."""
        self.given_up = False


class BackgroundWork(Generic[Asked, Done]):
    def __init__(self, name: str, work: Callable[[Asked], Done]) -> None:
        """work: raises nothing; called in the thread, which is started when it is first needed."""
        self._name, self._work = name, work
        self._waiting: deque[_Piece[Asked]] = deque()
        self._done: SimpleQueue[Done] = SimpleQueue()
        self._open = 0
        self._turns: list[_Turn[Asked]] = []
        """Those of the threads that do the work, mostly of one."""
        self._changed = threading.Condition()
        """Held for a piece or a turn to change hands, and never while a thread works."""
        self.stuck: list[Asked] = []
        """What was given up and is not over."""

    @property
    def busy(self) -> bool:
        """Whether something was begun that neither ``finished`` nor ``overdue`` has brought."""
        return self._open > 0

    def begin(self, asked: Asked, seconds: float = math.inf) -> None:
        """seconds: how long it may take at most, the time in which it waits and nothing else ends
        included; see ``overdue``."""
        self._open += 1
        with self._changed:
            self._waiting.append(_Piece(asked, seconds, time.monotonic()))
            if not self._turns:
                self._start()
            self._changed.notify()

    def _start(self) -> None:
        """Have one more thread that does the work, unless there are too many."""
        if len(self._turns) + len(self.stuck) < MOST_STUCK:
            turn = _Turn[Asked]()
            self._turns.append(turn)
            threading.Thread(target=self._run, args=(turn,), name=self._name, daemon=True).start()

    def finished(self) -> Iterator[Done]:
        """What is over since the last call, in the order in which it ended."""
        while self._open:
            try:
                done = self._done.get_nowait()
            except Empty:
                return
            self._open -= 1
            yield done

    def overdue(self) -> Iterator[Asked]:
        """Give up what takes longer than it may, and what nobody is left for to begin: what comes
        of it is dropped. Another thread does the rest. To be called often."""
        while self._open:
            with self._changed:
                piece = self._give_up(time.monotonic())
            if piece is None:
                return
            self._open -= 1
            yield piece.asked

    def _give_up(self, now: float) -> _Piece[Asked] | None:
        for turn in self._turns:
            piece = turn.piece
            if piece is not None and now - piece.since > piece.seconds:
                turn.given_up = True
                self._turns.remove(turn)
                self.stuck.append(piece.asked)
                if not self._turns:
                    self._start()
                return piece
        for piece in self._waiting:
            if not self._turns or now - piece.since > piece.seconds:
                self._waiting.remove(piece)
                return piece
        if self._waiting and all(self._is_slow(turn, now) for turn in self._turns):
            self._start()
        return None

    @staticmethod
    def _is_slow(turn: _Turn[Asked], now: float) -> bool:
        return turn.piece is not None and now - turn.piece.began > SLOW_SECONDS

    def _run(self, turn: _Turn[Asked]) -> None:
        torch.set_num_threads(1)
        with torch.inference_mode():
            while (piece := self._next(turn)) is not None:
                done = self._work(piece.asked)
                if not self._ended(turn, piece, done):
                    return

    def _next(self, turn: _Turn[Asked]) -> _Piece[Asked] | None:
        """The next piece; ``None``: another thread waits for it."""
        with self._changed:
            while not self._waiting:
                if len(self._turns) > 1:
                    self._turns.remove(turn)
                    return None
                self._changed.wait()
            piece = turn.piece = self._waiting.popleft()
            piece.began = time.monotonic()
            return piece

    def _ended(self, turn: _Turn[Asked], piece: _Piece[Asked], done: Done) -> bool:
        """Returns whether the thread goes on."""
        with self._changed:
            turn.piece = None
            now = time.monotonic()
            for one in self._waiting:
                one.since = now
            if not turn.given_up:
                self._done.put(done)
                return True
            self.stuck.remove(piece.asked)
            if self._turns:
                return False
            turn.given_up = False
            self._turns.append(turn)
            return True
