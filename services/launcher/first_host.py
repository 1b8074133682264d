"""The first host of a server on several: it tells the others what to start.

The others ask for their part, as members of the server (``Ask``), so that they need the router's
address and the secret alone. When all are there, the workers are placed by the devices of each
host; an engine's scheduler is on the host of its rank 0. A host that is gone leaves its part to the
next one that comes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.protocol.config import Config
from penstock.protocol.config.resolve import fields
from penstock.protocol.model_info import fingerprint
from penstock.protocol.process.plain_structlog import Logger
from penstock.protocol.wire.messages.administration import (
    Ask,
    HostOffer,
    HostPart,
    HostProcess,
    Told,
)
from penstock.services.launcher.children import children_of_model
from penstock.services.launcher.host_places import NoPlace, divided
from penstock.services.launcher.processes import Child

HOSTS_OWN = ("runtime_dir", "router", "bind", "advertise", "port_range", "secret", "device_index")
"""Settings of a process that its own host knows better."""
REPEAT_SECONDS = 30.0
"""How often it is said that hosts are missing."""


class _Seat(NamedTuple):
    """What a host other than the first does, and which one it is."""

    address: str
    host: str
    workers: range


class FirstHost:
    """Takes offers and gives parts."""

    def __init__(
        self,
        config: Config,
        engines: Sequence[Child],
        devices: int | None,
        living: Callable[[], Collection[str]],
        log: Logger,
    ) -> None:
        """config: of the model, with its folder; engines: all workers and schedulers; devices:
        CUDA devices here, from ``--device-index`` on, or ``None`` where all workers are elsewhere;
        living: the addresses of all members."""
        self.add: Callable[[Sequence[Child]], None]
        """Starts those of the engines that this host has. To be set before ``answer``."""
        self._config, self._engines = config, list(engines)
        self._nodes = config.launch.nodes
        self._world = config.cluster.world_size
        self._workers = self._world * config.launch.data_parallel_size
        self._devices = devices
        self._living, self._log = living, log
        self._offers: dict[str, HostOffer] = {}
        """By the address of the host's launcher, in the order in which they came."""
        self._seats: list[_Seat] = []
        self._said_at = 0.0
        self._fingerprint = fingerprint(Path(config.model.model))
        # As they are told to others: without anything that belongs to this host.
        self._told = children_of_model(config, {}, 0, named=False).engines

    @property
    def placed(self) -> bool:
        """All hosts have been there."""
        return bool(self._seats)

    def missing(self) -> str:
        """What is waited for, in words; empty: nothing."""
        if self.placed:
            living = self._living()
            gone = [seat.host for seat in self._seats if seat.address not in living]
            return f"host {', '.join(gone)} is gone" if gone else ""
        count = self._nodes - 1 - len(self._offers)
        return f"{count} of {self._nodes} hosts {'has' if count == 1 else 'have'} not joined"

    def command(self) -> str:
        """What is to be run on each of the others."""
        cluster = self._config.cluster
        given = cluster.secret if cluster.secret.startswith("file:") else "file:PATH"
        return f"penstock serve --join {cluster.router} --secret {given}"

    def remind(self, now: float) -> None:
        """Say from time to time what is waited for."""
        if (missing := self.missing()) and now - self._said_at >= REPEAT_SECONDS:
            self._said_at = now
            how = f"run on each, with the same secret: {self.command()}"
            self._log.info(f"{missing}; {how if self._devices is not None else 'Ray starts them'}")

    def answer(self, asked: Ask) -> Told:
        try:
            offer = msgspec.msgpack.decode(asked.about, type=HostOffer)
            part = self._part(asked.reply_to, offer)
        except msgspec.MsgspecError as error:
            part = HostPart(refused=str(error))
        return Told(asked.number, msgspec.msgpack.encode(part))

    def _part(self, address: str, offer: HostOffer) -> HostPart:
        living = self._living()
        if not self.placed:
            self._offers = {one: it for one, it in self._offers.items() if one in living}
            if address not in self._offers:
                self._offers[address] = offer
                self._log.info(f"host {offer.host} has joined", devices=offer.devices)
            if len(self._offers) < self._nodes - 1:
                return HostPart(waiting=self.missing())
            try:
                self._place()
            except NoPlace as refusal:
                del self._offers[address]
                self._log.error(str(refusal))
                return HostPart(refused=str(refusal))
        for number, seat in enumerate(self._seats):
            if seat.address == address:
                return self._told_of(seat)
            if seat.address not in living and self._has_room(offer, seat.workers):
                self._log.warning(
                    f"host {offer.host} takes the part of host {seat.host}, which is gone"
                )
                self._seats[number] = seat._replace(address=address, host=offer.host)
                return self._told_of(self._seats[number])
        return HostPart(
            refused=f"the server has its {self._nodes} hosts; start it with more --nodes for "
            f"another one (a host that is gone leaves its part to one with as many devices; "
            f"{offer.host} has {offer.devices})"
        )

    def _has_room(self, offer: HostOffer, workers: range) -> bool:
        return self._config.device.device != "cuda" or offer.devices >= len(workers)

    def _place(self) -> None:
        offers = list(self._offers.items())
        devices = [offer.devices for _, offer in offers]
        if self._devices is not None:
            devices.insert(0, self._devices)
        if self._config.device.device != "cuda":
            devices = [self._workers] * len(devices)
        others = divided(self._workers, self._config.cluster.tensor_parallel_size, devices)
        here = others.pop(0) if self._devices is not None else range(0)
        self._seats = [
            _Seat(address, offer.host, workers)
            for (address, offer), workers in zip(offers, others, strict=True)
        ]
        for seat in self._seats:
            self._log.info(f"host {seat.host} has {_workers(seat.workers)}")
        if here:
            self._log.info(f"this host has {_workers(here)}")
        self.add(self._of(here, self._engines))

    def _of(self, workers: range, engines: Sequence[Child]) -> list[Child]:
        """Those workers, and the schedulers of the engines whose rank 0 is among them."""
        return [
            child
            for child in engines
            if (child.number if child.service == "worker" else child.number * self._world)
            in workers
        ]

    def _told_of(self, seat: _Seat) -> HostPart:
        kept_back = {
            field.variable
            for field in fields().values()
            if field.group == "server" or field.name in HOSTS_OWN
        }
        processes = [
            HostProcess(
                child.service,
                child.number,
                {name: value for name, value in child.environment.items() if name not in kept_back},
            )
            for child in self._of(seat.workers, self._told)
        ]
        return HostPart(processes, self._config.model.model, self._fingerprint)


def devices_here(config: Config, gpus: int) -> int:
    """Of the first host or of another: those that count, from ``--device-index`` on."""
    return max(0, gpus - config.device.device_index)


def _workers(numbers: range) -> str:
    if len(numbers) == 1:
        return f"worker {numbers[0]}"
    return f"workers {numbers[0]} to {numbers[-1]}"
