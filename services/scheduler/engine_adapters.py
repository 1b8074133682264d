"""The adapters of one engine: which are loaded, being loaded, and on their way out.

Every rank reads an adapter for itself. It is the engine's once all have it, and its memory is given
back once no open request has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.administration import AdapterPlace, AdapterProgress
from penstock.protocol.wire.messages.engine import Adapter
from penstock.protocol.wire.messages.steps import (
    AdapterLoaded,
    DropAdapter,
    LoadAdapter,
    NameAdapters,
)
from penstock.services.scheduler.admission import Offers

HELD_SECONDS = 1.5
"""An adapter that is unloaded is still taken for so long: by then every frontend has heard of it,
and what they sent before that has come."""

RETURN_SECONDS = 10.0
"""The same where another scheduler had unloaded it: its requests come here by then."""

KEPT_LOADS = 64
"""Loads of which it is known what came of them."""


class _Loading(msgspec.Struct):
    place: AdapterPlace
    answers: dict[int, AdapterLoaded] = {}
    """By the worker's incarnation."""


class EngineAdapters:
    def __init__(self, ranks: int, send: Callable[[Message], bool]) -> None:
        """send: to every worker of the engine."""
        self._ranks, self._send = ranks, send
        self._loaded: dict[str, Adapter] = {}
        """By name."""
        self._loading: dict[str, _Loading] = {}
        self._over: dict[str, AdapterProgress] = {}
        """What came of the latest loads, by ``AdapterPlace.load``."""
        self._leaving: dict[str, float] = {}
        """Digest → since when no name stands for it."""
        self._unwanted: set[str] = set()
        """Digests that perhaps not every rank has."""

    @property
    def adapters(self) -> list[Adapter]:
        """Those that requests may have, without a name where they are on their way out."""
        leaving = (Adapter("", digest) for digest in self._leaving)
        return [*self._loaded.values(), *leaving]

    @property
    def digests(self) -> frozenset[str]:
        """Of those that requests may have."""
        return frozenset((*(one.digest for one in self._loaded.values()), *self._leaving))

    def attached(self, adapters: list[Adapter], now: float) -> None:
        """The workers have attached, perhaps others than before, with what they were told last."""
        self._loaded = {one.name: one for one in adapters if one.name}
        for loading in self._loading.values():
            self._note(loading, AdapterProgress("failed", reason="the worker was lost meanwhile"))
        self._loading.clear()
        self._leaving = {one.digest: now + RETURN_SECONDS for one in adapters if not one.name}
        self._unwanted.clear()

    def load(self, asked: AdapterPlace) -> AdapterProgress:
        """Begin to load an adapter, or tell how far it is."""
        if (over := self._over.get(asked.load)) is not None:
            return over
        loading = self._loading.get(asked.name)
        if loading is None:
            if not self._send(LoadAdapter(asked.name, asked.folder)):
                return AdapterProgress("failed", reason="the worker cannot be reached")
            self._loading[asked.name] = _Loading(asked)
        elif loading.place.load != asked.load:
            return AdapterProgress("failed", reason="it is being loaded by another request")
        return AdapterProgress("loading")

    def _note(self, loading: _Loading, progress: AdapterProgress) -> None:
        self._over[loading.place.load] = progress
        if len(self._over) > KEPT_LOADS:
            del self._over[next(iter(self._over))]

    def answered(self, sender: int, message: AdapterLoaded, now: float) -> None:
        """A worker has read one, or could not."""
        loading = self._loading.get(message.name)
        if loading is None or loading.place.folder != message.folder:
            self._unwanted |= {message.digest} - {""}  # a scheduler that is gone had asked for it
            self._drop_unwanted()
            return
        loading.answers[sender] = message
        if len(loading.answers) < self._ranks:
            return
        del self._loading[message.name]
        answers = list(loading.answers.values())
        reasons = [one.reason for one in answers if not one.digest]
        digests = {one.digest for one in answers}
        if not reasons and len(digests) > 1:
            reasons = ["its files changed while they were read"]
        if reasons:
            self._note(loading, AdapterProgress("failed", reason=reasons[0]))
            self._unwanted |= digests - {""}
            self._drop_unwanted()
            return
        former = self._loaded.get(message.name)
        self._loaded[message.name] = Adapter(message.name, message.digest, message.virtual_tokens)
        self._leave(former, now)
        self._send(NameAdapters(self.adapters))
        self._note(loading, AdapterProgress("loaded", message.digest))
        self._drop_unwanted()

    def _drop_unwanted(self) -> None:
        """Nothing is dropped while something is loaded: a rank may have that very adapter in its
        place by now, and would lose it."""
        if self._loading:
            return
        for digest in self._unwanted - self.digests:
            self._send(DropAdapter(digest))
        self._unwanted.clear()

    def unload(self, name: str, now: float) -> AdapterProgress:
        """Take no more requests for an adapter."""
        former = self._loaded.pop(name, None)
        self._leave(former, now)
        if former is not None:
            self._send(NameAdapters(self.adapters))
        return AdapterProgress("gone", "" if former is None else former.digest)

    def _leave(self, former: Adapter | None, now: float) -> None:
        named = {one.digest for one in self._loaded.values()}
        for digest in named & self._leaving.keys():
            del self._leaving[digest]
        if former is not None and former.digest not in named:
            self._leaving[former.digest] = now

    def sweep(self, not_done_by: Callable[[Offers], Sequence[int]], now: float) -> bool:
        """Drop what left a while ago and no open request has. Returns whether any was dropped.
        Nothing is dropped while something is loaded, which may be the same. not_done_by: see
        ``SchedulerCore``."""
        if self._loading:
            return False
        over = [
            digest
            for digest, since in self._leaving.items()
            if now - since > HELD_SECONDS
            and not not_done_by(Offers(adapters=self.digests - {digest}))
        ]
        for digest in over:
            del self._leaving[digest]
            self._send(DropAdapter(digest))
        return bool(over)
