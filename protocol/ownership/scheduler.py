"""The scheduler's side: it answers ``Accepted`` and holds nothing that nobody wants."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Protocol

import msgspec

from penstock.protocol.ownership.peers import Peers, Send
from penstock.protocol.ownership.rejections import failed, going_down
from penstock.protocol.ownership.tombstones import GRACE_SECONDS, Tombstones
from penstock.protocol.trace_context import log_fields
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.membership import Peer
from penstock.protocol.wire.messages.requests import (
    Accepted,
    Cancel,
    Enqueue,
    Holding,
    Rejected,
    TokenWork,
    Unknown,
)
from penstock.protocol.wire.messages.tokens import Continued

_log = logging.getLogger("penstock.ownership")
_decode_work = msgspec.msgpack.Decoder(TokenWork).decode


class Core(Protocol):
    """The part of the scheduler's core that the rules need. ``owner`` is an address."""

    def add(
        self, request_id: int, attempt: int, owner: str, work: TokenWork, now: float
    ) -> Rejected | None:
        """Take a request, or say why not. A higher attempt replaces a lower one."""

    def cancel(self, request_id: int, attempt: int, owner: str, choice: int = -1) -> bool:
        """Drop a request (or one choice of it) of this owner, up to this attempt."""

    def holder(self, request_id: int) -> tuple[int, str] | None:
        """(attempt, owner) of an open request."""

    def holding(self, owner: str) -> list[tuple[int, int]]:
        """(id, attempt) of every open request of an owner."""

    def max_output(self, request_id: int) -> int:
        """Tokens that a choice of an open request may have, at most; 0 for any other."""

    def failures(self, request_id: int) -> int:
        """Steps that died with an open request since its last token."""

    def owners(self) -> list[str]:
        """Addresses that have open requests here."""


class SchedulerLedger:
    """Guards the core: known attempts, tombstones, lost owners, reconciliation."""

    def __init__(self, members: Peers, send: Send, core: Core) -> None:
        self.core = core
        self.draining = False
        self._members = members
        self._send = send
        self._tombstones = Tombstones()
        self._taken_at: dict[int, float] = {}
        """When each open request came; those younger than the grace are not reconciled."""

    def handle(self, sender: int, message: Message, now: float) -> bool:
        """Take a message of a request; ``False`` when it is none."""
        match message:
            case Enqueue():
                self._on_enqueue(message, now)
            case Cancel():
                self._on_cancel(sender, message, now)
            case Holding():
                self._on_holding(message, now)
            case _:
                return False
        return True

    def _on_enqueue(self, message: Enqueue, now: float) -> None:
        if self._tombstones.covers(message.id, message.attempt):
            return
        holder = self.core.holder(message.id)
        if holder is not None and message.attempt <= holder[0]:
            if (message.attempt, message.reply_to) == holder:
                self._accepted(message)
            return
        goes_on = holder is not None and holder[1] == message.reply_to
        if self.draining and not goes_on:
            self._send(message.reply_to, going_down(message.id, message.attempt, "this engine"))
            return
        rejected = self._add(message, now)
        if rejected is None:
            self._taken_at[message.id] = now
            self._accepted(message)
        else:
            self._send(message.reply_to, rejected)

    def _accepted(self, message: Enqueue) -> None:
        most = self.core.max_output(message.id)
        self._send(message.reply_to, Accepted(message.id, message.attempt, max_tokens=most))

    def _add(self, message: Enqueue, now: float) -> Rejected | None:
        """Raises what the core raises. The request that it failed on has been answered then: sent
        to the next engine, it might end that one too."""
        number, attempt = message.id, message.attempt
        try:
            work = _decode_work(message.work)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return failed(number, attempt, f"malformed work: {error}")
        try:
            return self.core.add(number, attempt, message.reply_to, work, now)
        except Exception:
            _log.error("a request could not be taken in", extra=log_fields(work.head))
            reason = (
                "the scheduler failed when it took this request in, and is started again; its log "
                "says why"
            )
            self._send(message.reply_to, failed(number, attempt, reason))
            raise

    def _on_cancel(self, sender: int, message: Cancel, now: float) -> None:
        peer = self._members.peers.get(sender)
        for request_id, attempt, choice in zip(
            message.ids, message.attempts, message.choices, strict=True
        ):
            holder = self.core.holder(request_id)
            if choice < 0:
                self._tombstones.bury(request_id, attempt, now)
            if holder is None:
                continue
            # Through the router the owner's name is lost; its own Cancels come directly.
            owner = holder[1] if peer is None or peer.service != "tokenizer" else peer.address
            self.core.cancel(request_id, attempt, owner, choice)

    def _on_holding(self, message: Holding, now: float) -> None:
        """A tokenizer names what it holds here: drop what it left out, name what is unknown."""
        named = dict(zip(message.ids, message.attempts, strict=True))
        held = dict(self.core.holding(message.reply_to))
        for request_id, attempt in held.items():
            young = now - self._taken_at.get(request_id, 0.0) < GRACE_SECONDS
            if named.get(request_id) != attempt and not young:
                self.core.cancel(request_id, attempt, message.reply_to)
        unknown = [(i, a) for i, a in named.items() if held.get(i) != a]
        if unknown:
            self._send(message.reply_to, Unknown([i for i, _ in unknown], [a for _, a in unknown]))

    def hand_over(self, some: Collection[int] | None = None, *, prefilled: bool = False) -> None:
        """Give requests back to their owners, who find another engine for them: all, or those of
        these ids. ``prefilled``: their blocks are kept, and nothing was lost.

        What only waited is not suspected of having ended this one.
        """
        for owner in self.core.owners():
            ids, attempts, failures = [], [], []
            for request_id, attempt in self.core.holding(owner):
                if some is not None and request_id not in some:
                    continue
                ids.append(request_id)
                attempts.append(attempt)
                failures.append(self.core.failures(request_id))
                self.core.cancel(request_id, attempt, owner)
            if ids:
                self._send(owner, Unknown(ids, attempts, failures, prefilled))

    def tell_continued(self) -> None:
        """Their worker is lost, and all requests wait here for the next one."""
        for owner in self.core.owners():
            if held := self.core.holding(owner):
                ids, attempts = zip(*held, strict=True)
                self._send(owner, Continued([*ids], [*attempts]))

    def peers_gone(self, gone: dict[int, Peer]) -> None:
        """Cancel all that a lost tokenizer owned; its other frontends ask again elsewhere."""
        for peer in gone.values():
            for request_id, attempt in self.core.holding(peer.address):
                self.core.cancel(request_id, attempt, peer.address)

    def tick(self, now: float) -> None:
        """Forget, and drop what belongs to owners that never showed up. A few times a second."""
        self._tombstones.expire(now)
        addresses = {peer.address for peer in self._members.peers.values()}
        for owner in self.core.owners():
            if owner in addresses:
                continue
            for request_id, attempt in self.core.holding(owner):
                if now - self._taken_at.get(request_id, 0.0) > GRACE_SECONDS:
                    self.core.cancel(request_id, attempt, owner)
        self._taken_at = {
            request_id: when
            for request_id, when in self._taken_at.items()
            if now - when < GRACE_SECONDS
        }
