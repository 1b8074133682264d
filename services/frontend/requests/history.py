"""The requests of one frontend: those that run, and for a while those that have ended."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from penstock.services.frontend.bodies.administration import RequestLife, RequestState

if TYPE_CHECKING:
    from penstock.services.frontend.generation import Generation

MAX_ENDED = 4096
MAX_AGE_S = 3600.0
REFUSED = "rejected"
"""What a generation calls the end of a request that never ran."""
ABORTED = "aborted"
"""Code of the error that ends a request because somebody asked for its end."""


class History:
    def __init__(
        self,
        *,
        max_ended: int = MAX_ENDED,
        max_age_s: float = MAX_AGE_S,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """wall: seconds since the epoch."""
        self._max_ended = max_ended
        self._max_age_s = max_age_s
        self._wall = wall
        self._running: dict[Generation, float] = {}
        """With the time of their arrival."""
        self._ended: OrderedDict[int, tuple[str, str, RequestLife, float]] = OrderedDict()
        """Id, owner, life and time of the end; the oldest first."""
        self._numbers = itertools.count()

    def began(self, generation: Generation) -> None:
        """A request has come; call ``ended`` whatever happens."""
        self._running[generation] = self._wall() - (generation.now() - generation.arrival)

    def ended(self, generation: Generation) -> None:
        """Idempotent."""
        received = self._running.pop(generation, None)
        if received is None:
            return
        caller, now = generation.caller, self._wall()
        self._ended[next(self._numbers)] = (
            caller.request_id,
            caller.tenant(),
            life_of(generation, received, None),
            now,
        )
        while self._ended:
            first, (_, _, _, at) = next(iter(self._ended.items()))
            if len(self._ended) <= self._max_ended and now - at <= self._max_age_s:
                break
            del self._ended[first]

    def running(self, name: str, owner: str | None) -> list[Generation]:
        """Requests of this id that run. owner: ``None``: anybody's."""
        return [
            one
            for one in self._running
            if one.caller.request_id == name and owner in (None, one.caller.tenant())
        ]

    def all_running(self, names: Iterable[str], owner: str | None) -> list[list[Generation]]:
        """Of each id the requests that run. owner: as for ``running``."""
        found: dict[str, list[Generation]] = {name: [] for name in names}
        for one in self._running:
            named = found.get(one.caller.request_id)
            if named is not None and owner in (None, one.caller.tenant()):
                named.append(one)
        return list(found.values())

    def find(self, name: str, owner: str | None) -> RequestLife | None:
        """The newest request of this id."""
        for generation in reversed(self.running(name, owner)):
            received = self._running[generation]
            return life_of(generation, received, self._ahead(generation))
        now = self._wall()
        for known, whose, life, at in reversed(self._ended.values()):
            if known == name and owner in (None, whose) and now - at <= self._max_age_s:
                return life
        return None

    def _ahead(self, generation: Generation) -> int | None:
        """Requests for the same model that came before it and have no token yet; ``None`` once it
        has one."""
        if generation.first_at:
            return None
        served = generation.request.served
        before = itertools.takewhile(lambda one: one is not generation, self._running)
        return sum(one.request.served == served and not one.first_at for one in before)


def life_of(generation: Generation, received: float, ahead: int | None) -> RequestLife:
    """What is known of a request. received: its arrival, in seconds since the epoch."""
    usage, arrival, error = generation.usage, generation.arrival, generation.error
    first, ended = generation.first_at, generation.ended_at
    states = list(_states(generation, received))
    return RequestLife(
        id=generation.caller.request_id,
        key=generation.key.name,
        model=generation.request.model,
        state=states[-1].state,
        states=states,
        ahead=ahead,
        choices=len(generation.request.prompts) * generation.request.params.n,
        prompt_tokens=usage.prompt,
        cached_tokens=usage.cached,
        output_tokens=usage.completion,
        queue_ms=_ms(generation.queued_s),
        prefill_ms=_ms(first - arrival - generation.queued_s) if first else None,
        decode_ms=_ms(ended - first) if first and ended else None,
        total_ms=_ms((ended or generation.now()) - arrival),
        finish=",".join(generation.reasons) or None,
        error=None if error is None else error.message,
        engine=",".join(generation.engines) or None,
        preemptions=generation.preemptions,
        continuations=generation.continuations,
    )


def _states(generation: Generation, received: float) -> Iterator[RequestState]:
    def state(name: str, after: float) -> RequestState:
        return RequestState(state=name, at=_time(received + after))

    arrival, queued = generation.arrival, generation.queued_s
    yield state("received", 0.0)
    if generation.accepted_at:
        yield state("queued", generation.accepted_at - arrival)
    if generation.first_at:
        yield state("running", max(queued, generation.accepted_at - arrival))
        yield state("first_token", generation.first_at - arrival)
    if generation.ended_at:
        yield state(_end_of(generation), generation.ended_at - arrival)


def _end_of(generation: Generation) -> str:
    """The last state of a request that has ended."""
    error = generation.error
    if error is None:
        return "aborted" if "abort" in generation.reasons else "finished"
    if error.code == ABORTED:
        return "aborted"
    return "refused" if REFUSED in generation.reasons else "failed"


def _time(seconds: float) -> str:
    when = datetime.fromtimestamp(seconds, UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _ms(seconds: float) -> float:
    return max(0.0, round(1000 * seconds, 1))
