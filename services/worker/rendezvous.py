"""Where the ranks of one engine find each other: rank 0 listens, the scheduler tells the others.

The address is there before torch is, since it is part of what a worker says of itself at its
start. What comes of the meeting are connections of torch's own: they are neither encrypted nor
authenticated, so they stay on the loopback interface unless the worker itself is told to listen
elsewhere.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

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
        self._meeting: GroupMeeting | None = None
        """What the others find each other by: they may ask for as long as rank 0 lives."""
        self._listener: socket.socket | None = None
        if listens:
            self._listener = _listening(host)
            self.address = f"{host}:{self._listener.getsockname()[1]}"

    def of(self, address: str, name: str) -> GroupMeeting:
        """The meeting of one group. address: of its rank 0; name: unlike any other group's."""
        return GroupMeeting(address, name, self.host, self._listener)

    def meet(self, executor: Executor, message: Attach) -> None:
        """Let an executor meet those of the other ranks, which are asked to attach at the same
        time; once in an epoch, since of the one before some may have begun a step that others have
        not heard of. Raises ``Ended`` where they do not come."""
        if message.epoch == self._epoch:
            return
        self._meeting = self.of(message.rendezvous, f"{message.group} {message.epoch}")
        try:
            executor.meet(self._meeting)
        except Exception as error:
            raise Ended(
                f"the ranks of its engine have not met at {message.rendezvous}: "
                f"{type(error).__name__}: {error}; it begins anew"
            ) from error
        self._epoch = message.epoch


class GroupMeeting:
    """See ``rank_group.Meeting``."""

    def __init__(self, address: str, name: str, host: str, listener: socket.socket | None) -> None:
        self.name = name
        self._address, self._host, self._listener = address, host, listener
        self._store: Any = None

    def store(self, limit: datetime.timedelta) -> Any:
        """Of rank 0 the one that all use. Raises ``RuntimeError`` where it cannot be reached."""
        from torch import distributed

        if self._store is None:
            host, _, port = self._address.rpartition(":")
            listens = self._listener is not None
            # The store closes it.
            handle = os.dup(self._listener.fileno()) if self._listener is not None else None
            self._store = distributed.TCPStore(  # type: ignore[attr-defined]

                host, int(port), None, listens, limit, wait_for_workers=False,
                master_listen_fd=handle,
            )  # fmt: skip
        return self._store

    def interface(self) -> str:
        """The address at which this rank listens to the others."""
        return self._host


def _listening(host: str) -> socket.socket:
    failure: OSError | None = None
    for interface in (
        (host, "") if host != LOOPBACK else (host,)
    ):  # "": the host is an advertised one
        try:
            return socket.create_server((interface, 0), backlog=1024)
        except OSError as error:
            failure = error
    raise ConfigError(
        f"rank 0 cannot listen to the other ranks of its engine at {host}: {failure}; --bind names "
        "another interface"
    )
