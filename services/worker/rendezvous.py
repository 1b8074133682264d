"""Where the ranks of one engine find each other: rank 0 listens, the scheduler tells the others.

The address is there before torch is, since it is part of what a worker says of itself at its
start. What comes of the meeting are connections of torch's own: they are neither encrypted nor
authenticated, so they stay on the loopback interface unless the worker itself is told to listen
elsewhere.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.process.participant import Ended
from penstock.protocol.wire.messages.steps import Attach
from penstock.services.worker.executor import Executor

if TYPE_CHECKING:
    import datetime


LOOPBACK = "127.0.0.1"


def own_host(address: str) -> str:
    """Where the other ranks reach a process whose mailbox has this address."""
    if not address.startswith("tcp://"):
        return LOOPBACK
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def rendezvous_of(config: Config, mailbox: str) -> Rendezvous | None:
    """Of the worker with this mailbox; ``None`` where it computes alone. Raises ``ConfigError``."""
    if config.cluster.world_size == 1 or config.device.device == "null":
        return None
    return Rendezvous(own_host(mailbox), listens=not config.cluster.rank)


def cannot_go_on(reason: str) -> Ended:
    """For a rank that has not executed a plan: others may be in that step, and wait for it."""
    return Ended(f"{reason}; the other ranks of its engine cannot go on without it: all begin anew")


class Rendezvous:
    """One rank's end of it."""

    def __init__(self, host: str, *, listens: bool) -> None:
        """host: where the others reach this rank; listens: whether it is rank 0. Raises
        ``ConfigError`` where it cannot listen there."""
        self.host = host
        self.address = ""
        """``host:port`` where the others find this rank; empty for all but rank 0."""
        self._epoch = 0
        """The one for which the ranks have met."""
        self._store: Any = None
        self._listener: socket.socket | None = None
        if listens:
            self._listener = _listening(host)
            self.address = f"{host}:{self._listener.getsockname()[1]}"

    def meet(self, executor: Executor, message: Attach) -> None:
        """Let an executor meet those of the other ranks, which are asked to attach at the same
        time; once in an epoch, since of the one before some may have begun a step that others have
        not heard of. Raises ``Ended`` where they do not come."""
        if message.epoch == self._epoch:
            return
        name = f"{message.group} {message.epoch}"
        try:
            executor.meet(EpochMeeting(name, self, message.rendezvous))
        except Exception as error:
            raise Ended(
                f"the ranks of its engine have not met at {message.rendezvous}: "
                f"{type(error).__name__}: {error}; it begins anew"
            ) from error
        self._epoch = message.epoch

    def store(self, address: str, limit: datetime.timedelta) -> Any:
        """What all ranks can read and write, the same in every epoch: rank 0 has it, and the others
        know its address. Raises ``RuntimeError`` where it cannot be reached in time."""
        from torch import distributed

        if self._store is None:
            host, _, port = address.rpartition(":")
            listens = self._listener is not None
            # The store closes it.
            handle = os.dup(self._listener.fileno()) if self._listener is not None else None
            self._store = distributed.TCPStore(  # type: ignore[attr-defined]
                host,
                int(port),
                None,
                listens,
                limit,
                wait_for_workers=False,
                master_listen_fd=handle,
            )
        return self._store


class EpochMeeting(NamedTuple):
    """See ``rank_group.Meeting``."""

    name: str
    rendezvous: Rendezvous
    address: str
    """Of rank 0."""

    def store(self, limit: datetime.timedelta) -> Any:
        """See ``Rendezvous.store``."""
        return self.rendezvous.store(self.address, limit)

    def interface(self) -> str:
        """The address at which this rank listens to the others."""
        return self.rendezvous.host


def _listening(host: str) -> socket.socket:
    failure: OSError | None = None
    interfaces = (host,) if host == LOOPBACK else (host, "")  # it may be an advertised one
    for interface in interfaces:
        try:
            return socket.create_server((interface, 0), backlog=1024)
        except OSError as error:
            failure = error
    raise ConfigError(
        f"rank 0 cannot listen to the other ranks of its engine at {host}: {failure}; --bind names "
        "another interface"
    )
