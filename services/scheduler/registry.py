"""The open requests: by id, by owner and by deadline."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.services.scheduler.ordered_queue import OrderedQueue
from penstock.services.scheduler.sequence import Request, Sequence


class RequestRegistry:
    """Every request with a sequence that has not ended."""

    def __init__(self) -> None:
        self._by_id: dict[int, Request] = {}
        self._by_owner: dict[str, dict[int, Request]] = {}
        self._by_deadline: OrderedQueue[Request] = OrderedQueue()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._by_id.values()))

    def get(self, request_id: int) -> Request | None:
        return self._by_id.get(request_id)

    def not_begun(self, before: float, most: int) -> list[int]:
        """As in ``SchedulerCore``."""
        late = (r for r in self if 0 < r.head.hand_overs < most and r.queued_at < before)
        return [one.id for one in late if not any(s.has_begun for s in one.open.values())]

    def of(self, owner: str) -> list[Request]:
        return list(self._by_owner.get(owner, {}).values())

    def owners(self) -> list[str]:
        return list(self._by_owner)

    def sequences(self) -> Iterator[Sequence]:
        for request in self:
            yield from list(request.open.values())

    def add(self, request: Request) -> None:
        self._by_id[request.id] = request
        self._by_owner.setdefault(request.owner, {})[request.id] = request
        if request.deadline is not None:
            request.deadline_key = (request.deadline, request.id)
            self._by_deadline.push(request.deadline_key, request)

    def remove(self, request: Request) -> None:
        del self._by_id[request.id]
        owned = self._by_owner[request.owner]
        del owned[request.id]
        if not owned:
            del self._by_owner[request.owner]
        if request.deadline_key is not None:
            self._by_deadline.remove(request.deadline_key)
            request.deadline_key = None

    def first_overdue(self, now: float) -> Request | None:
        """The request whose deadline passed first, if any has passed."""
        if len(self._by_deadline) and self._by_deadline.first_key()[0] <= now:
            return self._by_deadline[0]
        return None
