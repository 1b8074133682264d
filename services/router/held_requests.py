"""Requests that wait in the router for a tokenizer or an engine, within bounds.

They stand by what they wait for, a service of a model, and within it by their age. So a look at the
oldest of each tells that nothing is due, however many wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from penstock.protocol.wire.messages.requests import Enqueue, Submit

MAX_HELD = 10_000
MAX_HELD_BYTES = 256 * 1024 * 1024
"""Bytes of all held requests for one model together, at most."""
MAX_HELD_BYTES_IN_ALL = 512 * 1024 * 1024
"""Bytes of all held requests for all models, at most: what the router's memory has to bear."""
OVERHEAD_BYTES = 1024
"""What a held request takes beside its work; it counts in ``MAX_HELD_BYTES_IN_ALL``."""

Request = Submit | Enqueue
Key = tuple[int, str]
"""A request's id and the service that it waits for."""
Target = tuple[str, str, str]
"""A service, the model of which one is needed, and the task that an engine must do."""


def service_of(message: Request) -> str:
    return "tokenizer" if isinstance(message, Submit) else "scheduler"


def task_of(message: Request) -> str:
    """The task that whoever gets it must do; empty: tokenizers do all."""
    return "" if isinstance(message, Submit) else message.task


def target_of(message: Request) -> Target:
    return service_of(message), message.model, task_of(message)


class HeldRequests:
    """Holds at most one attempt of a request for each service."""

    def __init__(self) -> None:
        self._held: dict[Key, tuple[Request, float]] = {}
        """(message, since when)."""
        self._waiting: dict[Target, dict[Key, None]] = {}
        """Oldest first. A target has an entry while something waits for it."""
        self.counts: Counter[str] = Counter()
        """How many are held for each model, where any are."""
        self._bytes: Counter[str] = Counter()
        """Bytes held by model; what waits for one takes no place of another's."""
        self._bytes_in_all = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: object) -> bool:
        return key in self._held

    @property
    def bytes(self) -> int:
        """What all held requests take, with their overhead."""
        return self._bytes_in_all

    def attempt(self, key: Key) -> int | None:
        """The attempt that is held, if any."""
        found = self._held.get(key)
        return found[0].attempt if found is not None else None

    def age(self, now: float) -> float:
        """Seconds that the request that waits longest has waited; 0 when none does."""
        return max(
            (now - self._held[next(iter(keys))][1] for keys in self._waiting.values()), default=0.0
        )

    def since(self, key: Key, now: float) -> float:
        """Since when a request has waited; ``now`` for one that does not."""
        found = self._held.get(key)
        return found[1] if found is not None else now

    def targets(self) -> list[Target]:
        """What requests wait for."""
        return list(self._waiting)

    def waiting(self, target: Target) -> list[Request]:
        """All that wait for it, oldest first."""
        return [self._held[key][0] for key in self._waiting.get(target, ())]

    def older_than(self, since: float, target: Target) -> Iterator[Request]:
        """Requests that have waited for ``target`` since before ``since``, oldest first. Each must
        be taken out before the next is asked for."""
        while (keys := self._waiting.get(target)) is not None:
            message, began = self._held[next(iter(keys))]
            if began >= since:
                return
            yield message

    def hold(self, message: Request, now: float) -> str:
        """Hold a request in the place of an earlier attempt of it. One that is held already keeps
        its age. Returns why there is no room, or an empty string."""
        model, target = message.model, target_of(message)
        key = (message.id, target[0])
        known, since = self._held.get(key, (None, now))
        if known is not None and target_of(known) != target:
            self.release(key)
            known = None
        more = len(message.work) - (len(known.work) if known is not None else 0)
        if reason := self._full(model, more, is_new=known is None):
            return reason
        if known is not None and known.attempt == message.attempt:
            self._held[key] = (message, since)  # with the time left now
            self._bytes[model] += more
            self._bytes_in_all += more
            return ""
        self.release(key)
        self._held[key] = (message, now)
        self._waiting.setdefault(target, {})[key] = None
        self._count(message, 1)
        return ""

    def _full(self, model: str, more: int, *, is_new: bool) -> str:
        in_all = self._bytes_in_all + more + OVERHEAD_BYTES * is_new
        if is_new and self.counts[model] >= MAX_HELD:
            return f"{MAX_HELD} requests wait for it"
        if more > 0 and self._bytes[model] + more > MAX_HELD_BYTES:
            return f"requests of {MAX_HELD_BYTES >> 20} MiB wait for it"
        if (more > 0 or is_new) and in_all > MAX_HELD_BYTES_IN_ALL:
            return (
                f"requests of {MAX_HELD_BYTES_IN_ALL >> 20} MiB wait for all models together, "
                "which is as much as the router holds"
            )
        return ""

    def release(self, key: Key) -> None:
        """Hold a request no longer."""
        message, _ = self._held.pop(key, (None, 0.0))
        if message is not None:
            target = target_of(message)
            del self._waiting[target][key]
            if not self._waiting[target]:
                del self._waiting[target]
            self._count(message, -1)

    def _count(self, message: Request, by: int) -> None:
        model, size = message.model, len(message.work)
        self.counts[model] += by
        self._bytes[model] += by * size
        self._bytes_in_all += by * (size + OVERHEAD_BYTES)
        if not self.counts[model]:
            del self.counts[model], self._bytes[model]
