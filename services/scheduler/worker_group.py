"""The workers of one engine, ranks 0 to N-1, as one.

Every rank gets every plan. Rank 0 sends the results; of the others only failures count. What one
rank has computed is worth nothing without the others, so a rank that is lost ends them all: those
that still live are told, end, and are started again, and until all ranks are there anew the engine
has no worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from penstock.protocol.process.plain_structlog import Logger
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.engine import Adapter, EngineSizes
from penstock.protocol.wire.messages.membership import Peer, Phase
from penstock.protocol.wire.messages.steps import Attach, Attached
from penstock.services.scheduler.limits import Limits

ATTACH_SECONDS = 1.0
WITHOUT_YOU = [0]
"""A group that nobody is in: whoever is asked to join it ends."""
MOST_FORMER = 4096
"""Workers of former groups that are known."""
MAY_DIFFER = ("num_blocks", "max_model_len")
"""Sizes in which ranks may differ, for their memory may: the smallest counts."""


class WorkerGroup:
    """Finds the ranks of an engine, attaches them all, and speaks to them."""

    def __init__(
        self, size: int, address: str, send: Callable[[str, Message], bool], epoch: int, log: Logger
    ) -> None:
        """``address``: where the workers answer to. ``epoch``: the one before the first."""
        self.epoch = epoch
        self.attached = False
        """All ranks are there and agree."""
        self.note = ""
        """What is missing, for people."""
        self._size = size
        self._address = address
        self._send = send
        self._log = log
        self._peers: list[Peer] = []
        """The workers by rank; empty: there is no group."""
        self._ranks: dict[int, int] = {}
        """Incarnation → rank, of the group's workers."""
        self._answers: dict[int, Attached] = {}
        """What the workers answered, by rank."""
        self._former: deque[int] = deque(maxlen=MOST_FORMER)
        """Incarnations of those whose group has lost another rank. They are kept: under a new
        router one may be gone for a moment, and then be there again."""
        self._refused = ""
        """Why these workers form no group."""
        self._ask_at = 0.0

    def look(self, workers: Iterable[Peer], now: float) -> None:
        """Form the group from the engine's living workers, oldest first, as soon as all ranks are
        there, and ask them to attach until they have."""
        if self.attached or now < self._ask_at:
            return
        found: dict[int, Peer] = {}
        former = []
        for peer in workers:
            if peer.incarnation in self._former:
                former.append(peer)
            else:
                found[peer.identity.rank] = peer
        if former:
            self._ask_at = now + ATTACH_SECONDS
            for peer in former:
                self._send(peer.address, Attach(self.epoch, self._address, WITHOUT_YOU))
        if not self._peers and not self._form(found):
            return
        self._ask_at = now + ATTACH_SECONDS
        group = [peer.incarnation for peer in self._peers]
        for rank, peer in enumerate(self._peers):
            latest = found.get(rank, peer)
            if rank not in self._answers:
                self.note = (
                    self._refused or f"{self._name(rank)} {latest.phase} {latest.note}".strip()
                )
                meeting = self._peers[0].identity.rendezvous
                self._send(peer.address, Attach(self.epoch, self._address, group, meeting))

    def _form(self, found: dict[int, Peer]) -> bool:
        """Make a group of the workers by rank, if they are all there."""
        if strangers := sorted(rank for rank in found if rank >= self._size):
            self._refuse(
                f"there is a worker of rank {strangers[0]}, but the engine has {self._size} by "
                "--tensor-parallel-size and --pipeline-parallel-size"
            )
            return False
        missing = [rank for rank in range(self._size) if rank not in found]
        if missing:
            if self._size > 1:
                ranks = ", ".join(map(str, missing))
                self.note = f"waiting for rank {ranks} of {self._size} workers"
            return False
        if self._size > 1:  # one that still loads can neither join a group nor be told to leave it
            for rank in range(self._size):
                if found[rank].phase != Phase.READY:
                    self.note = f"{self._name(rank)} {found[rank].phase} {found[rank].note}".strip()
                    return False
        self._peers = [found[rank] for rank in range(self._size)]
        self._ranks = {peer.incarnation: rank for rank, peer in enumerate(self._peers)}
        self._answers.clear()
        self.epoch += 1
        return True

    def take(self, sender: int, message: Attached) -> Attached | None:
        """A worker has attached. Returns what all ranks together hold, with the last of them."""
        rank = self._ranks.get(sender)
        if self.attached or rank is None or message.epoch != self.epoch:
            return None
        if message.rank != rank:
            self._refuse(f"the worker of rank {rank} attached as rank {message.rank}")
            return None
        self._answers[rank] = message
        if len(self._answers) < self._size:
            return None
        answers = [self._answers[number] for number in range(self._size)]
        least = {name: min(getattr(one.sizes, name) for one in answers) for name in MAY_DIFFER}
        sizes = msgspec.structs.replace(answers[0].sizes, **least)
        if reason := self._difference(answers) or _unfit(sizes):
            self._refuse(reason)
            self._answers.clear()
            return None
        self.attached, self.note = True, ""
        everywhere = set.intersection(*(set(one.resident) for one in answers))
        resident = [digest for digest in answers[0].resident if digest in everywhere]
        return msgspec.structs.replace(answers[0], sizes=sizes, resident=resident)

    def _difference(self, answers: list[Attached]) -> str:
        """In what ranks differ that must not; empty: in nothing."""
        first = self._peers[0].identity
        for rank in range(1, self._size):
            other = self._peers[rank].identity
            pairs: list[tuple[str, object, object]] = [("model", first.model, other.model)]
            pairs.append(("model's files (fingerprint)", first.fingerprint, other.fingerprint))
            pairs.append(("tasks", _names(answers[0].tasks), _names(answers[rank].tasks)))
            pairs.append(("generation", answers[0].generates, answers[rank].generates))
            held = [_digests(answers[each].adapters) for each in (0, rank)]
            pairs.append(("adapters", held[0], held[1]))
            pairs.append(("places of adapters", answers[0].places, answers[rank].places))
            for name in answers[0].sizes.__struct_fields__:
                if name not in MAY_DIFFER:
                    mine, theirs = (getattr(answers[r].sizes, name) for r in (0, rank))
                    pairs.append((name, mine, theirs))
            for name, mine, theirs in pairs:
                if mine != theirs:
                    return (
                        f"the workers of one engine must be alike: {name} of rank 0 is {mine}, of "
                        f"rank {rank} {theirs}; start them with the same model and settings"
                    )
        return ""

    def _refuse(self, reason: str) -> None:
        """Say it once, not at every look."""
        if reason != self._refused:
            self._log.error(reason)
        self._refused = self.note = reason

    def lost(self, gone: Iterable[int]) -> str:
        """Which worker of the group is among those incarnations that are gone, in words; empty:
        none. With it the group is at its end."""
        ranks = [self._ranks[one] for one in gone if one in self._ranks]
        if not ranks:
            return ""
        name = self._name(min(ranks))
        if self._size > 1:
            self._former += self._ranks
        self._peers, self._ranks = [], {}
        self._answers.clear()
        self.attached, self._refused = False, ""
        self._ask_at = 0.0
        return name

    def _name(self, rank: int) -> str:
        return "worker" if self._size == 1 else f"worker of rank {rank}"

    def has(self, sender: int) -> bool:
        """Whether this process is one of the group's workers."""
        return sender in self._ranks

    def is_first(self, sender: int) -> bool:
        """Whether it is rank 0, who speaks for all."""
        return self._ranks.get(sender) == 0

    def send(self, message: Message) -> bool:
        """Send a plan, or what else all must know, to every rank. ``False``: some rank does not get
        it."""
        taken = [self._send(peer.address, message) for peer in self._peers]
        return bool(taken) and all(taken)

    def send_first(self, message: Message) -> bool:
        """Send something to rank 0 alone, ahead of the plans that follow."""
        return bool(self._peers) and self._send(self._peers[0].address, message)


def _digests(adapters: list[Adapter]) -> str:
    """Adapters in an order that does not matter."""
    return ", ".join(sorted(f"{one.name} ({one.digest})" for one in adapters)) or "none"


def _names(tasks: list[str]) -> str:
    """Tasks in an order that does not matter."""
    return ", ".join(sorted(tasks)) or "none"


def _unfit(sizes: EngineSizes) -> str:
    """Why an engine of these sizes cannot work; empty: it can."""
    try:
        Limits.of(sizes)
    except ValueError as error:
        return f"the worker cannot be used: {error}"
    return ""
