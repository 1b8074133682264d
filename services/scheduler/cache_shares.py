"""How much of the prefix cache a part of the requests may have."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple


class CacheShares(NamedTuple):
    """Parts of all KV blocks, from 0 to 1."""

    retained: float = 0.5
    """Blocks that requests have asked to retain, at most."""
    tenant: float = 1.0
    """Cached blocks that one tenant may have before its own are reused ahead of others'; 1: all."""

    @property
    def has_tenants(self) -> bool:
        """Whether a tenant's part is bounded at all."""
        return self.tenant < 1.0


DEFAULT_SHARES = CacheShares()


class TenantQueues:
    """Cached blocks that nobody holds by the tenant that held them last, and who has too many.

    All operations are O(1) for each block. There are no more queues than such blocks.
    """

    def __init__(self, most: int) -> None:
        """``most``: cached blocks that one tenant may have before some of them go first."""
        self._most = most
        self._queues: dict[str, OrderedDict[int, None]] = {}
        """Least recently used first. What no tenant has held is in none."""
        self._tenants: dict[int, str] = {}
        self._excessive: OrderedDict[str, None] = OrderedDict()
        """Tenants with more than ``most``, in the order in which they came to it."""

    def add(self, block: int, tenant: str) -> None:
        """Nobody holds this cached block any more; the tenant did."""
        if not tenant:
            return
        queue = self._queues.setdefault(tenant, OrderedDict())
        queue[block] = None
        self._tenants[block] = tenant
        if len(queue) == self._most + 1:
            self._excessive[tenant] = None

    def remove(self, block: int) -> None:
        """It is held again, or is cached no more."""
        tenant = self._tenants.pop(block, "")
        if not tenant:
            return
        queue = self._queues[tenant]
        del queue[block]
        if len(queue) == self._most:
            del self._excessive[tenant]
        if not queue:
            del self._queues[tenant]

    def put_first(self, block: int) -> None:
        """Of its tenant's blocks it is to be reused first."""
        if tenant := self._tenants.get(block):
            self._queues[tenant].move_to_end(block, last=False)

    def first_of_excess(self) -> int | None:
        """The least recently used block of a tenant that has too many; ``None``: nobody has."""
        for tenant in self._excessive:
            return next(iter(self._queues[tenant]))
        return None

    def check(self, cached: OrderedDict[int, None]) -> None:
        """Compare with the blocks that are cached and held by nobody. Raises ``RuntimeError``."""
        blocks = {block: tenant for tenant, queue in self._queues.items() for block in queue}
        if blocks != self._tenants or not blocks.keys() <= cached.keys():
            raise RuntimeError("the cached blocks and those of tenants differ")
        excessive = [tenant for tenant, queue in self._queues.items() if len(queue) > self._most]
        if sorted(excessive) != sorted(self._excessive) or not all(self._queues.values()):
            raise RuntimeError("tenants with too many cached blocks are not known as such")
