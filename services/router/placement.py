"""Which member a request goes to: the one that has computed the most of its prompt before, or the
one with the most room; and never twice to who refused it.

A request weighs as many as it has open choices: engines run sequences, one for each. What an engine
holds of a prompt counts against the load there. Each sequence that is open beyond those of the
engine with the most room costs ``TOKENS_A_SEQUENCE`` of it, and past ``MAX_EXCESS`` no prompt goes
there for what it holds. An engine that got more than its share of the latest requests
must hold the more of a prompt, the more that is: half of it for a sixteenth more, nine tenths for a
fifth. Else chats that begin alike would fill one engine's cache while little is going on, and leave
the others' empty.

A request that not every engine can hold to its end goes to one that can, if there is one: it may be
the continuation of one that was begun by a larger engine.

A resent request goes where it went before, as long as that process lives: elsewhere it would run
twice. Another attempt of it is placed anew, and elsewhere if there is an elsewhere: its last place
turned it away, forgot it or was lost.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Container

import msgspec

from penstock.protocol.prefix_digest import DIGEST_BYTES, covered
from penstock.protocol.wire.messages.membership import Phase
from penstock.services.router.member import Member
from penstock.services.router.roster import Roster

ROUTE_SECONDS = 60.0
MAX_ROUTES = 1_000_000
TOKENS_A_SEQUENCE = 128
"""Prompt tokens that must be spared for each sequence by which an engine is busier than another: so
the first turns of chats that share a short system prompt spread out, and long ones stay."""
MAX_EXCESS = 0.25
"""An engine that is fuller than the emptiest by more than this share of its slots counts as one
that holds nothing of the prompt."""
FADE_SECONDS = 60.0
"""A request counts among the latest by a share that falls to 1/e in so long."""
FEW_REQUESTS = 6
"""Requests by which an engine may pass its share of the latest ones, whatever it holds."""

PLACED_BY = ("prefix", "load", "room")
"""An engine that holds some of the prompt, one that does not because those that do are too busy, or
the one with the most room since nobody holds any."""

Key = tuple[int, str]
"""A request's id and the service that it goes to."""


class Route(msgspec.Struct, frozen=True, gc=False):
    """Where a request went last, and who had it before."""

    incarnation: int
    attempt: int
    when: float
    refused: tuple[int, ...] = ()
    """Incarnations that earlier attempts of it came back from."""
    counted: int = 0
    """Choices by which ``Member.routed`` was raised for it, until the member's next beat."""
    beats: int = 0
    """The member's beats at that time."""


class Placement:
    """Chooses members, and remembers for a minute what it chose."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._routes: OrderedDict[Key, Route] = OrderedDict()
        """Oldest first."""
        self._faded_at: float | None = None
        self.placed_by = dict.fromkeys(PLACED_BY, 0)
        """Requests whose prompts have digests, by what chose their engine."""

    def choose(
        self,
        key: Key,
        attempt: int,
        now: float,
        model: str = "",
        prefix: bytes = b"",
        choices: int = 1,
        tokens: int = 0,
        task: str = "",
    ) -> Member | None:
        """The ready member of a model for an attempt of a request; ``None`` while there is none.

        ``prefix``: digests of its prompt, see ``penstock.protocol.prefix_digest``. ``choices``:
        those that are open. ``tokens``: positions of the longest of them in the end. ``task``: what
        an engine must do.
        """
        route = self._routes.get(key)
        if route is not None and route.attempt == attempt:
            member = self._roster.members.get(route.incarnation)
            if member is not None and member.phase == Phase.READY:
                return member
        ready = _that_hold(tokens, self._roster.ready(key[1], model, task))
        refused = _refused(route, attempt)
        others = [member for member in ready if member.incarnation not in refused]
        return self._best(others or ready, prefix, choices, now)

    def _best(
        self, members: list[Member], prefix: bytes, choices: int, now: float
    ) -> Member | None:
        """Where the least is left to compute, for the load that is there."""
        if not members:
            return None
        rooms = [_room(member, choices, now) for member in members]
        least = min(rooms)
        found = members[rooms.index(least)]
        if not prefix or len(members) == 1:
            return found
        numbers = [member.incarnation for member in members]
        depths = self._roster.prefixes.depths(prefix, numbers)
        if not depths:
            self.placed_by["room"] += 1
            return found
        held = [covered(depths.get(number, 0)) for number in numbers]
        prompt = covered(len(prefix) // DIGEST_BYTES)
        share = sum(member.recent for member in members) / len(members)
        worths = [
            _worth(member, room, least, tokens, prompt, share)
            for member, room, tokens in zip(members, rooms, held, strict=True)
        ]
        at = worths.index(max(worths))
        self.placed_by["prefix" if held[at] else "load"] += 1
        return members[at]

    def placed(
        self,
        key: Key,
        attempt: int,
        member: Member,
        now: float,
        prefix: bytes = b"",
        choices: int = 1,
    ) -> None:
        """An attempt goes to a member. Once all have refused the request, all are asked again."""
        known = self._routes.pop(key, None)
        refused = _refused(known, attempt)
        if member.incarnation in refused:
            refused = ()
        place = member.incarnation
        counted, beats = choices, member.beats
        if known is not None and (known.incarnation, known.attempt) == (place, attempt):
            counted, beats = known.counted, known.beats  # sent again: it has been counted
        else:
            self._uncount(known)
            member.routed += choices
        self._routes[key] = Route(place, attempt, now, refused, counted, beats)
        if len(self._routes) > MAX_ROUTES:
            self._routes.popitem(last=False)
        member.recent += 1.0
        if prefix:
            self._roster.prefixes.sent(member.incarnation, prefix, now)

    def keep(self, key: Key, now: float) -> None:
        """The request waits for a member: where it was is remembered from now on again."""
        route = self._routes.pop(key, None)
        if route is not None:
            self._routes[key] = msgspec.structs.replace(route, when=now)

    def gone(self, key: Key, attempt: int, choices: int | None = None) -> None:
        """Attempts of a request up to this one are no load any more, or so many choices of them."""
        route = self._routes.get(key)
        if route is not None and route.attempt <= attempt:
            left = self._uncount(route, choices)
            self._routes[key] = msgspec.structs.replace(route, counted=left)

    def _uncount(self, route: Route | None, choices: int | None = None) -> int:
        """Take what a route has added to the load of its member from that, unless a beat of it has
        said since what is open there. Returns what is left of it."""
        if route is None:
            return 0
        member = self._roster.members.get(route.incarnation)
        if member is None or member.beats != route.beats:
            return 0
        less = route.counted if choices is None else min(choices, route.counted)
        member.routed -= less
        return route.counted - less

    def knows(self, key: Key) -> bool:
        return key in self._routes

    def where(self, key: Key) -> Member | None:
        """The member that a request went to, if it lives."""
        route = self._routes.get(key)
        return self._roster.members.get(route.incarnation) if route is not None else None

    def tick(self, now: float, held: Container[Key] = ()) -> None:
        """Forget what is older than ``ROUTE_SECONDS``, unless its request is held, and what else
        time makes worthless."""
        self._roster.prefixes.expire(now)
        if self._faded_at is not None:
            left = math.exp((self._faded_at - now) / FADE_SECONDS)
            for member in self._roster.members.values():
                member.recent *= left
        self._faded_at = now
        while self._routes:
            oldest = next(iter(self._routes))
            if now - self._routes[oldest].when < ROUTE_SECONDS:
                return
            if oldest in held:
                self.keep(oldest, now)
            else:
                del self._routes[oldest]

    def __len__(self) -> int:
        return len(self._routes)


def _that_hold(tokens: int, members: list[Member]) -> list[Member]:
    """The members that can hold a sequence of so many positions, else those that hold the most."""
    if not tokens or len(members) == 1:
        return members
    longest = [member.capacity.max_model_len or math.inf for member in members]
    least = min(tokens, max(longest, default=0))
    return [member for member, most in zip(members, longest, strict=True) if most >= least]


def _refused(route: Route | None, attempt: int) -> tuple[int, ...]:
    """The engines that this attempt should avoid."""
    if route is None or attempt <= route.attempt:
        return route.refused if route is not None else ()
    return (*route.refused, route.incarnation)


def _slots(member: Member) -> int:
    return sum(demand.slots for demand in member.demands) or member.capacity.max_num_seqs or 1


def _room(member: Member, choices: int, now: float) -> tuple[float, float]:
    """How full a member would be with so many choices more; the least is best.

    What would run there over what can run at the same time, then the requests it got lately.
    """
    return (member.open_at(now) + choices) / _slots(member), member.recent


def _worth(
    member: Member,
    room: tuple[float, float],
    least: tuple[float, float],
    held: int,
    prompt: int,
    share: float,
) -> tuple[float, float, float]:
    """Tokens that a prompt finds there, less what the load there costs; the most is best.

    Args:
        room: the member's; ``least`` is that of the one with the most.
        held: tokens of the prompt that are cached there.
        prompt: its tokens, as far as it has digests.
        share: of the latest requests, for each member.
    """
    excess = room[0] - least[0]
    cost = TOKENS_A_SEQUENCE * excess * _slots(member)
    if excess > MAX_EXCESS:
        held = 0
    elif (surplus := member.recent - share - FEW_REQUESTS) > 0:
        cost += 4 * prompt * prompt / (held or prompt) * surplus / share
    return held - cost, -room[0], -room[1]
