"""The members that may get a request, as they are found once and used until one of them changes."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence

from penstock.protocol.wire.messages.membership import Role
from penstock.services.router.member import RECKONED_SECONDS, Member


class ReadyMembers:
    """Ready members of a service, for one model and task."""

    __slots__ = ("_shortest", "have_roles", "members", "places")

    def __init__(self, members: Iterable[Member]) -> None:
        self.members = tuple(members)
        self.places = {member.incarnation: at for at, member in enumerate(self.members)}
        """The place of each in ``members``."""
        self.have_roles = any(member.identity.role != "both" for member in self.members)
        self._shortest = min(map(_longest, self.members), default=math.inf)

    def without(self, refused: Container[int]) -> ReadyMembers:
        """Those that have not refused; all, if all have."""
        others = [member for member in self.members if member.incarnation not in refused]
        return ReadyMembers(others) if others else self

    def that_have(self, adapter: str) -> ReadyMembers:
        """Those that have loaded an adapter, by its digest; all where none has, since one that an
        engine has just unloaded is still taken there for a moment."""
        having = [member for member in self.members if member.has(adapter)]
        return self if not having or len(having) == len(self.members) else ReadyMembers(having)

    def for_role(self, role: Role) -> ReadyMembers:
        """Those that have this role or both; there may be none."""
        wanted = ("both", role)
        return ReadyMembers([one for one in self.members if one.identity.role in wanted])

    def that_repeat(self) -> ReadyMembers:
        """Those that repeat answers bit for bit; all where none does: they refuse."""
        repeating = [member for member in self.members if member.capacity.repeats]
        same = not repeating or len(repeating) == len(self.members)
        return self if same else ReadyMembers(repeating)

    def that_hold(self, tokens: int) -> ReadyMembers:
        """Those that can hold a sequence of so many positions, else those that hold the most."""
        if tokens <= self._shortest or len(self.members) == 1:
            return self
        longest = [_longest(member) for member in self.members]
        least = min(tokens, max(longest))
        pairs = zip(self.members, longest, strict=True)
        return ReadyMembers([member for member, most in pairs if most >= least])


def rooms(members: Sequence[Member], choices: int, now: float) -> list[float]:
    """How full each would be with so many choices more, what would run there over what can run at
    the same time. It is asked for all members at every request: ``Member.open_at`` is written out.
    """
    found = []
    for member in members:
        since = now - member.beaten_at
        if since > RECKONED_SECONDS:
            since = RECKONED_SECONDS
        count = member.load + member.routed - member.ending * since
        found.append(((count if count > 0.0 else 0.0) + choices) / member.slots)
    return found


def _longest(member: Member) -> float:
    """Positions of a sequence there, at most."""
    return member.capacity.max_model_len or math.inf
