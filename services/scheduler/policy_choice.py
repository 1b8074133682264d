"""From the name of a scheduling policy to the policy: built in, or brought by another package."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from penstock.protocol.config import ConfigError
from penstock.services.scheduler.fair import FairByTenant
from penstock.services.scheduler.policy import FirstComeFirstServed, Priority, SchedulingPolicy
from penstock.services.scheduler.shortest_job import ShortestJobFirst

ENTRY_POINT_GROUP = "penstock.scheduling_policies"
MEMBERS = (
    *("name", "uses_prefix_cache", "key", "victim", "lane", "lane_key", "on_lane_opened"),
    *("on_prefill", "on_decode", "on_finished"),
)
"""What a policy must have; deriving from ``SchedulingPolicy`` gives all but the first ``name``
and ``key``."""

POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {
    FirstComeFirstServed.name: FirstComeFirstServed,
    Priority.name: Priority,
    ShortestJobFirst.name: ShortestJobFirst,
    FairByTenant.name: FairByTenant,
}
"""Built in. These names are taken: an entry point of the same name is not looked at."""


def make_policy(name: str) -> SchedulingPolicy:
    """The policy of that name.

    A name that is not built in is looked up among the entry points of ``ENTRY_POINT_GROUP``; only
    the one that is asked for is loaded. Raises ``ConfigError`` for a name that nobody offers, that
    two packages offer, or whose package does not deliver a policy.
    """
    make = POLICIES.get(name)
    if make is not None:
        return make()
    installed = entry_points(group=ENTRY_POINT_GROUP)
    offers = dict.fromkeys(_Offer(point) for point in installed if point.name == name)
    found = sorted(offers, key=str)
    if not found:
        names = [*POLICIES, *sorted(dict.fromkeys(point.name for point in installed))]
        raise ConfigError(
            f"unknown scheduling policy {name!r}; --scheduling-policy takes one of: "
            f"{', '.join(names)}, or the name of an entry point in the group {ENTRY_POINT_GROUP} "
            "of a package that is installed beside the scheduler"
        )
    if len(found) > 1:
        raise ConfigError(
            f"the scheduling policy {name!r} is offered {len(found)} times: "
            f"{' and '.join(map(str, found))}; uninstall all but one"
        )
    return found[0].make()


class _Offer:
    """One entry point of our group."""

    def __init__(self, point: EntryPoint) -> None:
        self._point = point
        distribution = point.dist
        self._source = (
            "an unknown distribution"
            if distribution is None
            else f"distribution {distribution.name} {distribution.version}"
        )

    def __str__(self) -> str:
        return f"{self._source} ({self._point.value})"

    def __eq__(self, other: object) -> bool:
        """A path that is searched twice offers everything twice."""
        return isinstance(other, _Offer) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def make(self) -> SchedulingPolicy:
        """Raises ``ConfigError`` that names the distribution, whatever its code does."""
        try:
            policy: SchedulingPolicy = self._point.load()()
        except Exception as error:
            raise self._broken(f"{type(error).__name__}: {error}") from error
        missing = [member for member in MEMBERS if not hasattr(policy, member)]
        if missing:
            raise self._broken(
                f"it makes a {type(policy).__name__} without {', '.join(missing)}; derive it from "
                "penstock.services.scheduler.policy.SchedulingPolicy"
            )
        return policy

    def _broken(self, cause: str) -> ConfigError:
        return ConfigError(
            f"the scheduling policy {self._point.name!r} of {self} cannot be used: {cause}; repair "
            "or uninstall that package, or choose another --scheduling-policy"
        )
