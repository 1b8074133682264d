"""Which member a request goes to: the one where it costs the least, by what is computed of its
prompt there and by what is open there, else the one with the most room; and never twice to who
refused it.

A request weighs as many as it has open choices: engines run sequences, one for each. What a prompt
costs at an engine is the product of the sequences that are open there and the tokens of the prompt
that the engine must compute, after "LMetric: Simple is Better" (arXiv:2603.15202): what is computed
delays all that is open there. So the busier all engines are, the more sequences may be open at one
that holds a prompt beyond those of another. A sum, in which a sequence is worth some tokens,
has chats leave their engines for the emptiest one as soon as loads differ by that, which they
always do where engines are many or busy; then all compute more and fall behind for good.
``MAX_EXCESS`` bounds the difference.

An engine that got more than its share of the latest requests must hold the more of a prompt, the
more that is: half of it for a sixteenth more, nine tenths for a fifth, if it is as full as the
others. Else chats that begin alike would fill one engine's cache while little is going on, and
leave the others' empty.

A request that not every engine can hold to its end goes to one that can, if there is one: it may be
the continuation of one that was begun by a larger engine.

Where engines have roles, a request whose first token has come goes to an engine that decodes, and
so does one whose prompt such an engine has cached nearly whole; any other goes to one that
prefills. While there is none of a role, any engine will do.

A resent request goes where it went before, as long as that process lives: elsewhere it would run
twice. Another attempt of it is placed anew, and elsewhere if there is an elsewhere: its last place
turned it away, forgot it or was lost.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Container, Sequence

import msgspec

from penstock.protocol.prefix_digest import DIGEST_BYTES, covered
from penstock.protocol.tasks import GENERATE
from penstock.protocol.wire.messages.membership import Phase
from penstock.services.router.member import Member
from penstock.services.router.ready_members import ReadyMembers, rooms
from penstock.services.router.roster import Roster

ROUTE_SECONDS = 60.0
MAX_ROUTES = 1_000_000
SEQUENCE_TOKENS = 256
"""Prompt tokens that a request counts for beside those that its engine must compute. So the first
turns of chats that share a short system prompt spread out, and long ones stay."""
IDLE_SEQUENCES = 3.0
"""Sequences that each engine counts as having more than it has: where little is going on, one more
or less matters little."""
MAX_EXCESS = 0.25
"""An engine that is fuller than twice the mean of the others by more than this share of its slots
counts as one that holds nothing of the prompt."""
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

    def __init__(self, roster: Roster, max_local_prefill_length: int = 0) -> None:
        self._roster = roster
        self._most_local = max_local_prefill_length
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
        adapter: str = "",
        begun: bool = False,
        deterministic: bool = False,
    ) -> Member | None:
        """The ready member of a model for an attempt of a request; ``None`` while there is none.

        ``prefix``: digests of its prompt, see ``penstock.protocol.prefix_digest``. ``choices``:
        those that are open. ``tokens``: positions of the longest of them in the end. ``task``: what
        an engine must do. ``adapter``: digest of the one that an engine should have. ``begun``: its
        first token has come. ``deterministic``: an engine should repeat answers bit for bit.
        """
        route = self._routes.get(key)
        if route is not None and route.attempt == attempt:
            member = self._roster.members.get(route.incarnation)
            if member is not None and member.phase == Phase.READY:
                return member
        ready = self._roster.ready_members(key[1], model, task)
        if adapter:
            ready = ready.that_have(adapter)
        if deterministic:
            ready = ready.that_repeat()
        ready = ready.that_hold(tokens)
        refused = _refused(route, attempt)
        if begun and ready.have_roles:
            return self._best(_to_go_on(ready, refused), prefix, choices, now)
        if refused:
            ready = ready.without(refused)
        if ready.have_roles:
            ready = self._with_role(ready, prefix, task)
        return self._best(ready, prefix, choices, now)

    def _with_role(self, ready: ReadyMembers, prefix: bytes, task: str) -> ReadyMembers:
        """Those whose role suits a new request; all where none does."""
        decode, prefill = ready.for_role("decode"), ready.for_role("prefill")
        if not decode.members or not prefill.members:
            return ready
        if task != GENERATE:
            return prefill
        lacks = covered(len(prefix) // DIGEST_BYTES) - self._most_held(decode, prefix)
        return decode if lacks < self._most_local else prefill

    def _most_held(self, ready: ReadyMembers, prefix: bytes) -> int:
        """Tokens of a prompt that the member of these which has cached the most of it has."""
        prefixes = self._roster.prefixes
        for depth, bits in prefixes.deepest(prefix):
            if any(incarnation in ready.places for incarnation in prefixes.engines_of(bits)):
                return covered(depth)
        return 0

    def _best(self, ready: ReadyMembers, prefix: bytes, choices: int, now: float) -> Member | None:
        """Where the prompt costs the least."""
        members = ready.members
        if not members:
            return None
        full = rooms(members, choices, now)
        least = min(full)
        if not prefix or len(members) == 1:
            return _emptiest(members, full, least)
        at, held = self._cheapest(ready, full, least, prefix)
        if at is None:
            self.placed_by["room"] += 1
            return _emptiest(members, full, least)
        self.placed_by["prefix" if held else "load"] += 1
        return members[at]

    def _cheapest(
        self, ready: ReadyMembers, full: Sequence[float], least: float, prefix: bytes
    ) -> tuple[int | None, int]:
        """The place of the member where a prompt costs the least, and the tokens that it holds;
        ``None``: nobody holds any.

        Those that hold the most are looked at first. Nobody is emptier than the emptiest, which
        says what a prompt costs at least where so much of it is held, so most are not looked at.
        """
        members, places, prefixes = ready.members, ready.places, self._roster.prefixes
        prompt = covered(len(prefix) // DIGEST_BYTES)
        share = sum([member.recent for member in members]) / len(members)
        slots = members[full.index(least)].slots
        others = len(members) - 1
        most = (2 * sum(full) + MAX_EXCESS * others) / (others + 2)  # see MAX_EXCESS
        least_open = least * slots + IDLE_SEQUENCES
        best: tuple[float, float, float] | None = None
        found, found_held, seen = None, 0, set[int]()
        for depth, bits in prefixes.deepest(prefix):
            held = covered(depth)
            if best is not None and best[0] < least_open * (SEQUENCE_TOKENS + prompt - held):
                return found, found_held
            for incarnation in prefixes.engines_of(bits):
                at = places.get(incarnation)
                if at is None:
                    continue
                cost = _cost(members[at], full[at], most, slots, held, prompt, share)
                if best is None or cost < best:
                    best, found, found_held = cost, at, held
                seen.add(at)
        if best is None or best[0] < least_open * (SEQUENCE_TOKENS + prompt):
            return found, found_held
        for at, member in enumerate(members):  # who holds nothing may cost as little
            if at not in seen:
                cost = _cost(member, full[at], most, slots, 0, prompt, share)
                if cost < best:
                    best, found, found_held = cost, at, 0
        return found, found_held

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
        prefixes = self._roster.prefixes
        if prefix and prefixes.num_engines > 1:  # where there is but one, nobody chooses
            prefixes.sent(member.incarnation, prefix, now)

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

    def came_back(self, key: Key, attempt: int) -> bool:
        """Whether an engine has had an earlier attempt of the request than this one."""
        route = self._routes.get(key)
        return route is not None and route.attempt < attempt

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


def _refused(route: Route | None, attempt: int) -> tuple[int, ...]:
    """The engines that this attempt should avoid."""
    if route is None or attempt <= route.attempt:
        return route.refused if route is not None else ()
    return (*route.refused, route.incarnation)


def _to_go_on(ready: ReadyMembers, refused: tuple[int, ...]) -> ReadyMembers:
    """Those for a request whose first token has come: engines that decode. Where its last place was
    one, and it comes back from all of them, engines that prefill."""
    decode, prefill = ready.for_role("decode"), ready.for_role("prefill")
    if not decode.members or not prefill.members:
        return ready.without(refused)
    came_back = bool(refused) and refused[-1] in decode.places
    if came_back and all(one in refused for one in decode.places):
        return prefill
    return decode.without(refused)


def _emptiest(members: Sequence[Member], full: Sequence[float], least: float) -> Member:
    """One that is as empty as ``least``; of several the one that got the fewest requests lately."""
    if full.count(least) == 1:
        return members[full.index(least)]
    return min(
        (member for member, room in zip(members, full, strict=True) if room == least),
        key=lambda member: member.recent,
    )


def _cost(
    member: Member, full: float, most: float, slots: int, held: int, prompt: int, share: float
) -> tuple[float, float, float]:
    """Sequences that are open there, times the tokens of a prompt that would be computed there; the
    least is best, and of equals the emptiest.

    Args:
        full: how full the member is. One that is fuller than ``most`` counts as holding nothing.
        slots: sequences that the emptiest one runs at the same time. All are counted in them, so
            that of unlike engines with nothing of a prompt the emptiest costs the least.
        held: tokens of the prompt that are cached there.
        prompt: its tokens, as far as it has digests.
        share: of the latest requests, for each member.
    """
    if full > most:
        held = 0
    tokens: float = SEQUENCE_TOKENS + prompt - held
    if (surplus := member.recent - share - FEW_REQUESTS) > 0:
        tokens += 4 * prompt * prompt / (held or prompt) * surplus / share
    return (full * slots + IDLE_SEQUENCES) * tokens, full, member.recent
