"""Which member a request goes to: the one with the most room, and never twice to who refused it.

A resent request goes where it went before, as long as that process lives: elsewhere it would run
twice. Another attempt of it is placed anew, and elsewhere if there is an elsewhere: its last place
turned it away, forgot it or was lost.
"""

from __future__ import annotations

import msgspec

from penstock.protocol.wire.messages.membership import Phase
from penstock.services.router.roster import Member, Roster

ROUTE_SECONDS = 60.0
MAX_ROUTES = 1_000_000

Key = tuple[int, str]
"""A request's id and the service that it goes to."""


class Route(msgspec.Struct, frozen=True, gc=False):
    """Where a request went last, and who had it before."""

    incarnation: int
    attempt: int
    when: float
    refused: tuple[int, ...] = ()
    """Incarnations that earlier attempts of it came back from."""


class Placement:
    """Chooses members, and remembers for a minute what it chose."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._routes: dict[Key, Route] = {}
        """Oldest first."""

    def choose(self, key: Key, attempt: int) -> Member | None:
        """The ready member for an attempt of a request; ``None`` while there is none."""
        route = self._routes.get(key)
        if route is not None and route.attempt == attempt:
            member = self._roster.members.get(route.incarnation)
            if member is not None and member.phase == Phase.READY:
                return member
        ready = self._roster.ready(key[1])
        refused = _refused(route, attempt)
        others = [member for member in ready if member.incarnation not in refused]
        return min(others or ready, key=_fullness, default=None)

    def placed(self, key: Key, attempt: int, member: Member, now: float) -> None:
        """An attempt goes to a member. Once all have refused the request, all are asked again."""
        refused = _refused(self._routes.pop(key, None), attempt)
        if member.incarnation in refused:
            refused = ()
        self._routes[key] = Route(member.incarnation, attempt, now, refused)
        if len(self._routes) > MAX_ROUTES:
            del self._routes[next(iter(self._routes))]

    def keep(self, key: Key, now: float) -> None:
        """The request waits for a member: where it was is remembered from now on again."""
        route = self._routes.pop(key, None)
        if route is not None:
            self._routes[key] = msgspec.structs.replace(route, when=now)

    def knows(self, key: Key) -> bool:
        return key in self._routes

    def where(self, key: Key) -> Member | None:
        """The member that a request went to, if it lives."""
        route = self._routes.get(key)
        return self._roster.members.get(route.incarnation) if route is not None else None

    def expire(self, now: float) -> None:
        """Forget what is older than ``ROUTE_SECONDS``."""
        while self._routes:
            oldest = next(iter(self._routes))
            if now - self._routes[oldest].when < ROUTE_SECONDS:
                return
            del self._routes[oldest]

    def __len__(self) -> int:
        return len(self._routes)


def _refused(route: Route | None, attempt: int) -> tuple[int, ...]:
    """Whom this attempt should avoid."""
    if route is None or attempt <= route.attempt:
        return route.refused if route is not None else ()
    return (*route.refused, route.incarnation)


def _fullness(member: Member) -> float:
    """What would run there with one request more, over what can run at the same time."""
    slots = member.demand.slots or member.capacity.max_num_seqs or 1
    return (member.load + member.routed + 1) / slots
