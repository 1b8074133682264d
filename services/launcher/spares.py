"""Processes that are prepared for the end of a worker (``--prepare-engines`` with
``--hold-weights``): what takes long is done when they are wanted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.protocol.wire.messages.membership import Peer, Phase
from penstock.services.launcher.processes import Child
from penstock.services.launcher.running_model import READY, RunningModel
from penstock.services.launcher.sleepers import Processes


class Spares:
    """One for each worker of a model that is awake, made when that is ready: whatever ends a worker
    as it starts finds none, and is started more and more slowly as ever."""

    def __init__(self) -> None:
        self.processes: Processes
        """To be set before the first ``tick``."""
        self._of: dict[Child, Child] = {}
        self._dropped: list[Child] = []
        """They are being ended."""

    def tick(self, models: Iterable[RunningModel], own: Mapping[int, Peer]) -> None:
        """Go on. Call it a few times a second. own: members by pid."""
        awake = [
            worker
            for model in models
            if model.state == READY and model.end is None
            for worker in model.engines
            if worker.service == "worker"
        ]
        for worker in [one for one in self._of if one not in awake]:
            self._drop(self._of.pop(worker))
        for worker in awake:
            peer, spare = own.get(worker.pid), self._of.get(worker)
            if peer is None or peer.phase != Phase.READY:
                continue
            if spare is None:
                self._of[worker] = spare = worker.spare()
                self.processes.add([spare])
            elif not spare.alive and spare.restart_at is None:  # it took a worker's place
                self.processes.remove([spare])
                del self._of[worker]

    def _drop(self, spare: Child) -> None:
        spare.restart_at = None
        if spare.alive:
            self._dropped.append(spare)
            spare.kill()
        else:
            self.processes.remove([spare])

    @property
    def ending(self) -> bool:
        """Whether some that are not wanted any more may still have memory of a device."""
        return bool(self._dropped)

    def close(self) -> None:
        """No others are made; what there is ends with all workers."""
        self._of.clear()

    def take(self, worker: Child) -> Child | None:
        """What is prepared for a worker that has ended."""
        spare = self._of.get(worker)
        return spare if spare is not None and spare.alive else None

    def ended(self, child: Child) -> bool:
        """A process has ended. Returns whether it was one that is not wanted any more."""
        if child not in self._dropped:
            return False
        self._dropped.remove(child)
        self.processes.remove([child])
        return True
