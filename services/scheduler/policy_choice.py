"""From the name of a scheduling policy to the policy: built in, or brought by another package."""

from __future__ import annotations

from collections.abc import Callable

from penstock.protocol.config import ConfigError
from penstock.protocol.extensions import extensions
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
    found = extensions(ENTRY_POINT_GROUP, "the scheduling policy", name)
    if not found:
        installed = sorted({one.name for one in extensions(ENTRY_POINT_GROUP, "")})
        raise ConfigError(
            f"unknown scheduling policy {name!r}; --scheduling-policy takes one of: "
            f"{', '.join((*POLICIES, *installed))}, or the name of an entry point in the group "
            f"{ENTRY_POINT_GROUP} of a package that is installed beside the scheduler"
        )
    if len(found) > 1:
        raise ConfigError(
            f"the scheduling policy {name!r} is offered {len(found)} times: "
            f"{' and '.join(map(str, found))}; uninstall all but one"
        )
    base = f"{SchedulingPolicy.__module__}.{SchedulingPolicy.__name__}"
    policy: SchedulingPolicy = found[0].make(
        MEMBERS, base, ", or choose another --scheduling-policy"
    )
    return policy
