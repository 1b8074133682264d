"""Memory of what was cancelled before it arrived."""

from __future__ import annotations

from collections import OrderedDict

TOMBSTONE_SECONDS = 60.0
RESEND_SECONDS = 1.0
RECONCILE_SECONDS = 2.0
GRACE_SECONDS = 3.0
"""A request younger than this is not cancelled because its owner does not name it yet."""
MAX_RESTARTS = 255
"""Continuations of a request at a tokenizer, and engines that handed it back, in all."""
MAX_STALLS = 3
"""Continuations of a request without a new token in between."""
MAX_TOMBSTONES = 100_000


class Tombstones:
    """Ids and the highest attempt of each that was cancelled, for ``TOMBSTONE_SECONDS``."""

    def __init__(self) -> None:
        # A plain dict looks for its first key behind all that were taken out before it, so that
        # forgetting n of them would cost n².
        self._graves: OrderedDict[int, tuple[int, float]] = OrderedDict()

    def bury(self, request_id: int, attempt: int, now: float) -> None:
        known = self._graves.pop(request_id, (attempt, now))
        self._graves[request_id] = (max(attempt, known[0]), now)
        if len(self._graves) > MAX_TOMBSTONES:
            self._graves.popitem(last=False)

    def covers(self, request_id: int, attempt: int) -> bool:
        grave = self._graves.get(request_id)
        return grave is not None and attempt <= grave[0]

    def expire(self, now: float) -> None:
        """Forget what is older than ``TOMBSTONE_SECONDS``; the dict is in order of age."""
        while self._graves:
            request_id = next(iter(self._graves))
            if now - self._graves[request_id][1] < TOMBSTONE_SECONDS:
                return
            del self._graves[request_id]

    def __len__(self) -> int:
        return len(self._graves)
