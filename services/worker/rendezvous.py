"""Where the ranks of one engine find each other: rank 0 listens, the scheduler tells the others.

The address is there before torch is, since it is part of what a worker says of itself at its
start. Over tcp with a secret what comes of the meeting are ``RankLinks``, encrypted with it. Else,
or where the network between the hosts is said to be closed (``--rank-traffic plain``), they are
connections of torch's own, neither encrypted nor authenticated: on one host they stay on the
loopback interface.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.process.participant import Ended
from penstock.protocol.process.service import port_range
from penstock.protocol.wire.mailbox import split_tcp
from penstock.protocol.wire.messages.steps import Attach
from penstock.protocol.wire.security import CurveKeys
from penstock.services.worker.executor import Executor
from penstock.services.worker.rank_links import RankLinks

if TYPE_CHECKING:
    import datetime


LOOPBACK = "127.0.0.1"
LIMIT_SECONDS = 30.0
"""In which the ranks of an engine find each other."""


def own_host(address: str) -> str:
    """Where the other ranks reach a process whose mailbox has this address."""
    if not address.startswith("tcp://"):
        return LOOPBACK
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def rendezvous_of(config: Config, mailbox: str) -> Rendezvous | None:
    """Of the worker with this mailbox; ``None`` where it computes alone. Raises ``ConfigError``
    and ``AddressError``."""
    cluster = config.cluster
    if cluster.world_size == 1 or config.device.device == "null":
        return None
    links, host = None, own_host(mailbox)
    if mailbox.startswith("tcp://") and cluster.secret and cluster.rank_traffic == "encrypted":
        links = _links_of(config, host)
    return Rendezvous(
        host,
        rank=cluster.rank,
        size=cluster.world_size,
        links=links,
        on_gpus=config.device.device == "cuda",
    )


def _links_of(config: Config, host: str) -> RankLinks:
    cluster = config.cluster
    reached = f"[{host}]" if ":" in host else host
    bind = split_tcp(cluster.bind)[0] if cluster.bind.startswith("tcp://") else reached
    return RankLinks(
        "*" if bind == "0.0.0.0" else bind,
        reached,
        keys=CurveKeys(cluster.secret),
        ports=port_range(cluster.port_range) if cluster.port_range else None,
    )


def cannot_go_on(reason: str) -> Ended:
    """For a rank that has not executed a plan: others may be in that step, and wait for it."""
    return Ended(f"{reason}; the other ranks of its engine cannot go on without it: all begin anew")


class Rendezvous:
    """One rank's end of it."""

    def __init__(
        self,
        host: str,
        *,
        rank: int,
        size: int,
        links: RankLinks | None = None,
        on_gpus: bool = False,
    ) -> None:
        """host: where the others reach this rank; links: its connections to them, where those of
        torch are not to be used. Raises ``ConfigError`` where it cannot listen there."""
        self.host = host
        self.links = links
        self.address = ""
        """``host:port`` where the others find this rank; empty for all but rank 0."""
        self.on_gpus = on_gpus
        self._rank, self._size = rank, size
        self._epoch = 0
        """The one for which the ranks have met."""
        self._store: Any = None
        self._linked = ""
        """The meeting for which ``links`` are connected."""
        self._listener: socket.socket | None = None
        if rank:
            return
        if links is not None:
            self.address = links.address
        else:
            self._listener = _listening(host)
            self.address = f"{host}:{self._listener.getsockname()[1]}"

    def meet(self, executor: Executor, message: Attach) -> None:
        """Let an executor meet those of the other ranks, which are asked to attach at the same
        time; once in an epoch, since of the one before some may have begun a step that others have
        not heard of. Raises ``Ended`` where they do not come."""
        if message.epoch == self._epoch:
            return
        self._check_network(message.rendezvous)
        name = f"{message.group} {message.epoch}"
        try:
            executor.meet(EpochMeeting(name, self, message.rendezvous))
        except Exception as error:
            raise Ended(
                f"the ranks of its engine have not met at {message.rendezvous}: "
                f"{type(error).__name__}: {error}; it begins anew"
            ) from error
        self._epoch = message.epoch

    def linked(self, name: str, address: str) -> RankLinks | None:
        """The connections to all other ranks in a meeting, made when they are first asked for;
        ``None``: those of torch are used. Raises ``RankFailed``."""
        if self.links is not None and name != self._linked:
            self.links.meet(name, address, self._rank, self._size, LIMIT_SECONDS)
            self._linked = name
        return self.links

    def store(self, address: str, limit: datetime.timedelta) -> Any:
        """What all ranks can read and write, the same in every epoch: rank 0 has it, and the others
        know its address. Raises ``RuntimeError`` where it cannot be reached in time."""
        if self._store is None:
            self._store = self._link_store() or self._torch_store(address, limit)
        return self._store

    def _link_store(self) -> Any:
        if self.links is None:
            return None
        from penstock.services.worker.link_group import LinkStore

        others = [rank for rank in range(self._size) if rank != self._rank]
        return LinkStore(self.links, others, LIMIT_SECONDS)

    def _torch_store(self, address: str, limit: datetime.timedelta) -> Any:
        from torch import distributed

        host, _, port = address.rpartition(":")
        listens = self._listener is not None
        # The store closes it.
        handle = os.dup(self._listener.fileno()) if self._listener is not None else None
        return distributed.TCPStore(  # type: ignore[attr-defined]
            host,
            int(port),
            None,
            listens,
            limit,
            wait_for_workers=False,
            master_listen_fd=handle,
        )

    def complaints(self) -> list[str]:
        """Who was refused that is no rank, for the log."""
        return self.links.complaints() if self.links is not None else []

    def _check_network(self, first: str) -> None:
        """NCCL encrypts nothing that goes to another host. Raises ``Ended``."""
        host = first.rpartition(":")[0].strip("[]")
        if self.links is not None and self.on_gpus and host != self.host:
            raise Ended(
                f"rank 0 of its engine is on {host}, this rank {self._rank} on {self.host}: NCCL "
                "would send what they compute between the two unencrypted, and --rank-traffic is "
                "encrypted; where that network is closed to others, start all with --rank-traffic "
                "plain"
            )


class EpochMeeting:
    """See ``rank_group.Meeting``."""

    def __init__(self, name: str, rendezvous: Rendezvous, address: str) -> None:
        """address: of rank 0."""
        self.name = name
        self._rendezvous, self._address = rendezvous, address

    def store(self, limit: datetime.timedelta) -> Any:
        """See ``Rendezvous.store``."""
        return self._rendezvous.store(self._address, limit)

    def interface(self) -> str:
        """The address at which this rank listens to the others."""
        return self._rendezvous.host

    def links(self) -> RankLinks | None:
        """See ``Rendezvous.linked``."""
        return self._rendezvous.linked(self.name, self._address)


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
