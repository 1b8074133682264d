"""Which engines hold which prefixes of prompts, as far as the router knows.

It knows what the engines tell in their beats, and, for a few seconds, what it has sent them since.
Both are bounded for each engine, whatever clients send: of more than that the router knows what was
in use last. What it has wrong costs an engine the computation of a prefix, and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from penstock.protocol.prefix_digest import DIGEST_BYTES, MAX_DIGESTS, split
from penstock.protocol.wire.messages.membership import PrefixReport

MAX_TOLD = 8192
"""Digests of one engine's reports: half a million tokens of short prompts, more of long ones."""
MAX_SENT = 4096
"""Digests of what was sent to one engine …"""
SENT_SECONDS = 3.0
"""… within so many seconds. By then its beats have told of it, or it waits there for long."""


class _Engine:
    """What is known of one engine."""

    __slots__ = ("bit", "sent", "told", "version")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.version = 0
        self.told: OrderedDict[bytes, None] = OrderedDict()
        """Digests that the engine holds; those in latest use come last."""
        self.sent: OrderedDict[bytes, float] = OrderedDict()
        """When each was sent last, oldest first."""


class PrefixIndex:
    """Digests of prefixes, and the engines that hold them."""

    def __init__(self) -> None:
        self._engines: dict[int, _Engine] = {}
        self._by_bit: dict[int, int] = {}
        """Incarnations by the bits of their engines."""
        self._holders: dict[bytes, int] = {}
        """The bits of all engines that hold a digest."""

    def version(self, incarnation: int) -> int:
        """The newest version of an engine's prefixes that is known; 0: none."""
        engine = self._engines.get(incarnation)
        return engine.version if engine is not None else 0

    def take(self, incarnation: int, report: PrefixReport) -> None:
        """What an engine tells; a change of something that got lost is left out, and told again."""
        engine = self._engines.get(incarnation)
        if engine is None:
            engine = self._engines[incarnation] = _Engine(self._free_bit())
            self._by_bit[engine.bit] = incarnation
        if report.version <= engine.version or report.since > engine.version:
            return
        held = dict.fromkeys(split(report.held)[-MAX_TOLD:])
        gone: Iterable[bytes] = split(report.gone)
        if report.since == 0:
            gone = [digest for digest in engine.told if digest not in held]
        engine.version = report.version
        for digest in gone:
            engine.told.pop(digest, None)
            self._drop(engine, digest)
        for digest in held:
            engine.told[digest] = None
            engine.told.move_to_end(digest)
            self._holders[digest] = self._holders.get(digest, 0) | engine.bit
        while len(engine.told) > MAX_TOLD:
            digest, _ = engine.told.popitem(last=False)
            self._drop(engine, digest)

    @property
    def num_engines(self) -> int:
        return len(self._engines)

    def sent(self, incarnation: int, prefix: bytes, now: float) -> None:
        """A prompt with these digests went to an engine, which will compute what it lacks."""
        engine = self._engines.get(incarnation)
        if engine is None:
            return  # it has no prefix cache
        told, sent, holders, bit = engine.told, engine.sent, self._holders, engine.bit
        for digest in split(prefix)[:MAX_DIGESTS]:
            if digest not in told:
                sent[digest] = now
                sent.move_to_end(digest)
                holders[digest] = holders.get(digest, 0) | bit
        while len(sent) > MAX_SENT:
            self._unsend(engine)

    def deepest(self, prefix: bytes) -> Iterator[tuple[int, int]]:
        """How many of a prompt's digests engines hold, the most first, with the bits of those that
        hold so many and no more: see ``engines_of``."""
        holders, seen = self._holders, 0
        for depth in range(min(len(prefix) // DIGEST_BYTES, MAX_DIGESTS), 0, -1):
            held = holders.get(prefix[DIGEST_BYTES * (depth - 1) : DIGEST_BYTES * depth], 0)
            if here := held & ~seen:
                seen |= here
                yield depth, here

    def engines_of(self, bits: int) -> Iterator[int]:
        """The incarnations of the engines with these bits."""
        while bits:
            bit = bits & -bits
            bits ^= bit
            yield self._by_bit[bit]

    def expire(self, now: float) -> None:
        """Forget what was sent more than ``SENT_SECONDS`` ago."""
        for engine in self._engines.values():
            while engine.sent and now - next(iter(engine.sent.values())) > SENT_SECONDS:
                self._unsend(engine)

    def forget(self, incarnation: int) -> None:
        """An engine is gone."""
        engine = self._engines.pop(incarnation, None)
        if engine is not None:
            del self._by_bit[engine.bit]
            for digest in engine.told.keys() | engine.sent.keys():
                self._clear(digest, engine.bit)

    def _free_bit(self) -> int:
        taken = sum(self._by_bit)
        return ~taken & (taken + 1)

    def _unsend(self, engine: _Engine) -> None:
        digest, _ = engine.sent.popitem(last=False)
        self._drop(engine, digest)

    def _drop(self, engine: _Engine, digest: bytes) -> None:
        """An engine may hold a digest no longer."""
        if digest not in engine.told and digest not in engine.sent:
            self._clear(digest, engine.bit)

    def _clear(self, digest: bytes, bit: int) -> None:
        left = self._holders.get(digest, 0) & ~bit
        if left:
            self._holders[digest] = left
        else:
            self._holders.pop(digest, None)

    def __len__(self) -> int:
        """Digests that are known, of all engines together."""
        return len(self._holders)
