"""What the ledgers of a request's owners say to the processes around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.membership import Peer
from penstock.protocol.wire.messages.requests import Cancel, Holding

Send = Callable[[str, Message], bool]


class Peers(Protocol):
    """The part of ``Participant`` that the rules need."""

    router_address: str
    router_incarnation: int
    peers: dict[int, Peer]


def incarnation_at(members: Peers, address: str) -> int:
    """Of the process at this address; 0 where the membership names none."""
    found = (peer.incarnation for peer in members.peers.values() if peer.address == address)
    return next(found, 0)


def disown(members: Peers, send: Send, sender: int, ids: list[int], attempts: list[int]) -> None:
    """Tell a process that works for nobody to drop it; one that is no member hears nothing."""
    peer = members.peers.get(sender)
    if peer is not None:
        send(peer.address, Cancel(ids, attempts, [-1] * len(ids)))


def reconcile(
    members: Peers,
    send: Send,
    service: str,
    own_address: str,
    held: Iterable[tuple[int, int, int]],
) -> None:
    """Tell every process of a service which requests it is believed to hold.

    ``held``: (incarnation of the holder, request id, attempt).
    """
    named: dict[int, tuple[list[int], list[int]]] = {
        peer.incarnation: ([], []) for peer in members.peers.values() if peer.service == service
    }
    for incarnation, request_id, attempt in held:
        if incarnation in named:
            ids, attempts = named[incarnation]
            ids.append(request_id)
            attempts.append(attempt)
    for incarnation, (ids, attempts) in named.items():
        send(members.peers[incarnation].address, Holding(own_address, ids, attempts))
