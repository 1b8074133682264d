"""A worker whose model sleeps, and which keeps all but its device's memory.

The launcher ends the scheduler and tells everybody that the model falls asleep and, with
``keeps_workers``, that its workers go on living. Without a scheduler this one puts its weights into
the host's memory, beside the message loop; when the model wakes it brings them back and is ready
for another scheduler. It has no executor meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from penstock.protocol.process.participant import Ended, Participant
from penstock.protocol.process.plain_structlog import Logger
from penstock.protocol.wire.messages.membership import Phase, Sleep
from penstock.services.worker.executor import DeviceFailed, Executor


class Resting:
    def __init__(
        self,
        participant: Participant,
        model: str,
        engine: str,
        set_phase: Callable[[str, str], None],
        log: Logger,
    ) -> None:
        """model, engine: whose worker it is."""
        self._participant, self._model, self._engine = participant, model, engine
        self._set_phase, self._log = set_phase, log
        self._executor: Executor | None = None
        """That of a worker that is away, leaves or comes back."""
        self._mover: threading.Thread | None = None
        self._failure: Exception | None = None
        self._comes_back = False
        self._began = 0.0

    @property
    def is_moving(self) -> bool:
        """Whether ``look`` is to be called soon."""
        return self._mover is not None

    def look(self, executor: Executor | None, end: Callable[[Executor], None]) -> Executor | None:
        """What the worker computes with from now on. end: lets an executor drop what it has.

        To be called when the membership has changed, and while something moves. Raises ``Ended``
        where the worker can do nothing but end, and ``DeviceFailed`` where its memory does not move
        as it should.
        """
        if self._mover is not None:
            return None if self._mover.is_alive() else self._moved()
        wanted = self._wanted()
        if executor is not None and wanted is False:
            if executor.rests is None:
                raise Ended("its model sleeps, and its weights can leave no device")
            end(executor)
            self._move(executor, executor.rests.leave, "putting weights into the host's memory")
            return None
        if self._executor is not None and wanted is True and self._executor.rests is not None:
            self._comes_back = True
            self._move(self._executor, self._executor.rests.come_back, "bringing weights back")
            return None
        return executor

    def _wanted(self) -> bool | None:
        """Whether the model wants its worker on the device; ``None``: it may be where it is."""
        sleeper = self._participant.sleepers.get(self._model)
        if sleeper is None or not sleeper.keeps_workers:
            return None
        if sleeper.state == Sleep.WAKING:
            return True
        schedulers = self._participant.of("scheduler", model=self._model)
        if any(peer.identity.engine == self._engine for peer in schedulers):
            return None
        return False

    def _move(self, executor: Executor, move: Callable[[], None], note: str) -> None:
        def run() -> None:
            try:
                move()
            except Exception as failure:
                self._failure = failure

        self._executor, self._began = executor, time.monotonic()
        self._set_phase(Phase.LOADING, note)
        self._mover = threading.Thread(target=run, name="weights", daemon=True)
        self._mover.start()

    def _moved(self) -> Executor | None:
        executor, self._mover = self._executor, None
        if self._failure is not None:
            raise DeviceFailed(f"its weights could not be moved: {self._failure}")
        seconds = time.monotonic() - self._began
        if not self._comes_back:
            self._log.info("weights are in the host's memory", seconds=round(seconds, 3))
            self._set_phase(Phase.ASLEEP, "")
            return None
        self._log.info("weights are back", seconds=round(seconds, 3))
        self._comes_back, self._executor = False, None
        self._set_phase(Phase.READY, "")
        return executor
