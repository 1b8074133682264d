"""The group of workers that a scheduler asks a worker to attach to, and the meeting of its ranks.

On CPUs a meeting has a thread of its own: while a rank waits for others, its loop goes on and hears
that one of them is gone, or that the scheduler has given the group up. That ends the rank at once;
it would else wait for whoever does not come, as long as ``rank_group`` and ``rendezvous`` allow.
On GPUs the ranks meet in the loop, whose thread has the device and captures graphs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from penstock.protocol.process.participant import Ended, Participant
from penstock.protocol.wire.messages.steps import Attach
from penstock.services.worker.executor import Executor
from penstock.services.worker.rendezvous import Rendezvous

MEET_LIMIT_SECONDS = 300.0
"""For finding the other ranks of the engine."""
MOST_GONE = 4096
"""Processes that are gone and known to be."""


class Attachment:
    """What a worker has been asked to attach to."""

    def __init__(self, participant: Participant, rendezvous: Rendezvous | None) -> None:
        """rendezvous: ``None`` where this worker computes alone."""
        self._participant, self._rendezvous = participant, rendezvous
        self._group: list[int] = []
        """Incarnations of the engine's workers by rank, this one among them."""
        self._gone: deque[int] = deque(maxlen=MOST_GONE)
        self._awaited: Attach | None = None
        """For which the ranks are meeting."""
        self._meeting: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def is_meeting(self) -> bool:
        """Whether it waits for the other ranks: its executor is not to be used."""
        return self._awaited is not None

    def check(self, message: Attach) -> None:
        """Raises ``Ended`` where this worker cannot do what it is asked to: it belongs to another
        group, in whose steps it may be, or to none."""
        group = message.group
        alien = self._participant.incarnation not in group or group != (self._group or group)
        if group and alien:
            raise Ended(
                "a rank of its engine was lost, or its engine has another group of workers: it "
                "begins anew"
            )
        if self._awaited is not None and message.epoch != self._awaited.epoch:
            raise Ended(
                "another scheduler asks for it while it waits for the other ranks of its engine: "
                "it begins anew"
            )

    def begin(self, executor: Executor, message: Attach) -> None:
        """Let the ranks meet, if there are others; ``over`` says when they have. Raises
        ``Ended``."""
        self._group, self._awaited = message.group, message
        if self._rendezvous is None:
            return
        self._look_for_lost(message.group)
        self._participant.status.begin(MEET_LIMIT_SECONDS)
        if self._rendezvous.on_gpus:
            self._rendezvous.meet(executor, message)
            return
        self._meeting = threading.Thread(
            target=self._meet, args=(self._rendezvous, executor, message), name="meet", daemon=True
        )
        self._meeting.start()

    def _meet(self, rendezvous: Rendezvous, executor: Executor, message: Attach) -> None:
        try:
            rendezvous.meet(executor, message)
        except BaseException as failure:
            self._failure = failure

    def over(self) -> Attach | None:
        """What it was asked, once, when the ranks have met for it. Raises ``Ended`` where they
        have not."""
        if self._awaited is None or (self._meeting is not None and self._meeting.is_alive()):
            return None
        if self._failure is not None:
            raise self._failure
        message, self._awaited, self._meeting = self._awaited, None, None
        if self._rendezvous is not None:
            self._participant.status.done()
        return message

    def peers_gone(self, gone: Iterable[int]) -> None:
        """These processes are no members any more. Raises ``Ended`` where one of them is awaited:
        it does not come. A group that computes already is told by its scheduler."""
        self._gone += gone
        if self._awaited is not None:
            self._look_for_lost(self._awaited.group)

    def _look_for_lost(self, group: list[int]) -> None:
        """One that was gone may be there again, under a new router."""
        living = self._participant.peers
        for rank, one in enumerate(group):
            if one in self._gone and one not in living:
                raise Ended(f"rank {rank} of its engine is gone: it begins anew")

    def complaints(self) -> list[str]:
        """Who was refused that is no rank, for the log."""
        return self._rendezvous.complaints() if self._rendezvous is not None else []
