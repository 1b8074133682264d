"""Work that a thread of its own does, one piece after another, while steps are computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

import torch

Asked = TypeVar("Asked")
Done = TypeVar("Done")


class BackgroundWork(Generic[Asked, Done]):
    def __init__(self, name: str, work: Callable[[Asked], Done]) -> None:
        """work: raises nothing; called in the thread, which is started when it is first needed."""
        self._name, self._work = name, work
        self._asked: SimpleQueue[Asked] = SimpleQueue()
        self._done: SimpleQueue[Done] = SimpleQueue()
        self._open = 0
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether something was begun that ``finished`` has not brought."""
        return self._open > 0

    def begin(self, asked: Asked) -> None:
        self._open += 1
        self._asked.put(asked)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def finished(self) -> Iterator[Done]:
        """What is over since the last call, in the order in which it was begun."""
        while self._open:
            try:
                done = self._done.get_nowait()
            except Empty:
                return
            self._open -= 1
            yield done

    def _run(self) -> None:
        torch.set_num_threads(1)
        with torch.inference_mode():
            while True:
                self._done.put(self._work(self._asked.get()))
