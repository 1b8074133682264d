"""Work that a thread of its own does, one piece after another, while steps are computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

import torch

Asked = TypeVar("Asked")
Done = TypeVar("Done")

MOST_STUCK = 4
"""Threads that may be stuck at the same time; then nothing is begun before one of them goes on."""


class _Turn(Generic[Asked]):
    """A thread's part in the work."""

    def __init__(self) -> None:
        self.asked: Asked | None = None
        """What it does now."""
        self.began = 0.0
        self.given_up = False


class BackgroundWork(Generic[Asked, Done]):
    def __init__(self, name: str, work: Callable[[Asked], Done]) -> None:
        """work: raises nothing; called in the thread, which is started when it is first needed."""
        self._name, self._work = name, work
        self._asked: SimpleQueue[Asked] = SimpleQueue()
        self._done: SimpleQueue[Done] = SimpleQueue()
        self._open = 0
        self._turn: _Turn[Asked] | None = None
        """That of the thread that does the work."""
        self._lock = threading.Lock()
        """Held for a thread's turn to change hands, and never while it works."""
        self.stuck: list[Asked] = []
        """What was given up and is not over."""

    @property
    def busy(self) -> bool:
        """Whether something was begun that neither ``finished`` nor ``overdue`` has brought."""
        return self._open > 0

    def begin(self, asked: Asked) -> None:
        self._open += 1
        self._asked.put(asked)
        with self._lock:
            self._start()

    def _start(self) -> None:
        """Have a thread that does the work, unless too many are stuck."""
        if self._turn is None and len(self.stuck) < MOST_STUCK:
            turn = self._turn = _Turn[Asked]()
            threading.Thread(target=self._run, args=(turn,), name=self._name, daemon=True).start()

    def finished(self) -> Iterator[Done]:
        """What is over since the last call, in the order in which it was begun."""
        while self._open:
            try:
                done = self._done.get_nowait()
            except Empty:
                return
            self._open -= 1
            yield done

    def overdue(self, seconds: Callable[[Asked], float]) -> Iterator[Asked]:
        """Give up what takes longer than it may, and what nobody is left for to begin: what comes
        of it is dropped. Another thread does the rest."""
        while self._open:
            with self._lock:
                asked = self._give_up(seconds)
            if asked is None:
                return
            self._open -= 1
            yield asked

    def _give_up(self, seconds: Callable[[Asked], float]) -> Asked | None:
        turn = self._turn
        if turn is None:
            return None if self._asked.empty() else self._asked.get_nowait()
        asked = turn.asked
        if asked is None or time.monotonic() - turn.began <= seconds(asked):
            return None
        turn.given_up, self._turn = True, None
        self.stuck.append(asked)
        self._start()
        return asked

    def _run(self, turn: _Turn[Asked]) -> None:
        torch.set_num_threads(1)
        with torch.inference_mode():
            while True:
                asked = self._asked.get()
                turn.began, turn.asked = time.monotonic(), asked
                done = self._work(asked)
                with self._lock:
                    turn.asked = None
                    if not turn.given_up:
                        self._done.put(done)
                        continue
                    self.stuck.remove(asked)
                    if self._turn is not None:
                        return
                    turn.given_up, self._turn = False, turn
