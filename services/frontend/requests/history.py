"""The requests of one frontend: those that run, and for a while those that have ended."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.client.meters import Usage
from penstock.protocol.wire.messages.administration import EngineProgress
from penstock.services.frontend.bodies.administration import RequestLife, RequestState

if TYPE_CHECKING:
    from penstock.services.frontend.generation import Generation

MAX_ENDED = 4096
MAX_AGE_S = 3600.0
REFUSED = "rejected"
"""What a generation calls the end of a request that never ran."""
ABORTED = "aborted"
"""Code of the error that ends a request because somebody asked for its end."""
MOST_ASKED = 4096
"""Prompts of one request that engines are asked about, the newest ones."""


class Record(NamedTuple):
    """What is known of a request. To write it takes little: most are never asked for."""

    id: str
    owner: str
    key: str
    model: str
    choices: int
    received: float
    """Seconds since the epoch; the other times are of the frontend's clock, 0: not yet."""
    arrival: float
    accepted: float
    first_token: float
    ended: float
    queued_s: float
    usage: Usage
    reasons: Iterable[str]
    engines: Iterable[str]
    handed_over_s: float
    preemptions: int | None
    continuations: int
    error: str | None
    error_code: str | None


class Found(NamedTuple):
    """A request as its frontend knows it."""

    life: RequestLife
    open_ids: list[int]
    """What engines may know more of."""


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
        self._ended: OrderedDict[int, tuple[Record, float]] = OrderedDict()
        """With the time of their end; the oldest first."""
        self._numbers = itertools.count()

    def began(self, generation: Generation) -> None:
        """A request has come; call ``ended`` whatever happens."""
        self._running[generation] = self._wall() - (generation.now() - generation.arrival)

    def ended(self, generation: Generation) -> None:
        """Idempotent."""
        received = self._running.pop(generation, None)
        if received is None:
            return
        now = self._wall()
        self._ended[next(self._numbers)] = record_of(generation, received), now
        while self._ended:
            first, (_, at) = next(iter(self._ended.items()))
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

    def find(self, name: str, owner: str | None) -> Found | None:
        """The newest request of this id."""
        for generation in reversed(self.running(name, owner)):
            received = self._running[generation]
            record = record_of(generation, received)
            life = life_of(record, generation.now(), self._ahead(generation))
            return Found(life, generation.open_ids[-MOST_ASKED:])
        now = self._wall()
        for record, at in reversed(self._ended.values()):
            is_it = record.id == name and owner in (None, record.owner)
            if is_it and now - at <= self._max_age_s:
                return Found(life_of(record, record.ended, None), [])
        return None

    def _ahead(self, generation: Generation) -> int | None:
        """Requests for the same model that came before it and have no token yet; ``None`` once it
        has one."""
        if generation.first_at:
            return None
        served = generation.request.served
        before = itertools.takewhile(lambda one: one is not generation, self._running)
        return sum(one.request.served == served and not one.first_at for one in before)


def record_of(generation: Generation, received: float) -> Record:
    """received: when it arrived, in seconds since the epoch."""
    request, caller, error = generation.request, generation.caller, generation.error
    return Record(
        id=caller.request_id,
        owner=caller.tenant(),
        key=generation.key.name,
        model=request.model,
        choices=len(request.prompts) * request.params.n,
        received=received,
        arrival=generation.arrival,
        accepted=generation.accepted_at,
        first_token=generation.first_at,
        ended=generation.ended_at,
        queued_s=generation.queued_s,
        usage=generation.usage,
        reasons=generation.reasons,
        engines=generation.engines,
        handed_over_s=generation.handed_over_s,
        preemptions=generation.preemptions,
        continuations=generation.continuations,
        error=None if error is None else error.message,
        error_code=None if error is None else error.code,
    )


def life_of(record: Record, now: float, ahead: int | None) -> RequestLife:
    """now: by the frontend's clock, or when it ended."""
    arrival, first, usage = record.arrival, record.first_token, record.usage
    states = list(_states(record))
    return RequestLife(
        id=record.id,
        key=record.key,
        model=record.model,
        state=states[-1].state,
        states=states,
        ahead=ahead,
        choices=record.choices,
        prompt_tokens=usage.prompt,
        cached_tokens=usage.cached,
        output_tokens=usage.completion,
        queue_ms=_ms(record.queued_s),
        prefill_ms=_ms(first - arrival - record.queued_s) if first else None,
        decode_ms=_ms(record.ended - first) if first and record.ended else None,
        total_ms=_ms((record.ended or now) - arrival),
        finish=",".join(record.reasons) or None,
        error=record.error,
        engine=",".join(record.engines) or None,
        hand_over_ms=_ms(record.handed_over_s) if record.handed_over_s >= 0.0 else None,
        preemptions=record.preemptions,
        continuations=record.continuations,
    )


def with_progress(found: Found, told: list[EngineProgress]) -> RequestLife:
    """What its frontend knows, and what engines tell beside it."""
    life = found.life
    if not told:
        return life
    is_whole = {one.id for one in told}.issuperset(found.open_ids)
    prefilled = life.prompt_tokens - sum(one.to_prefill for one in told)
    waiting = [one for one in told if one.waits_for]
    engines = [*(life.engine or "").split(","), *(one.engine for one in told)]
    life = msgspec.structs.replace(
        life,
        told_by="engine" if is_whole else "frontend",
        ahead=min((one.ahead for one in waiting if one.ahead >= 0), default=None),
        waits_for=waiting[0].waits_for if waiting else None,
        cached_tokens=life.cached_tokens + sum(one.cached for one in told),
        prefilled_tokens=max(0, prefilled) if is_whole else None,
        engine=",".join(filter(None, dict.fromkeys(engines))) or None,
        preemptions=(life.preemptions or 0) + sum(one.preemptions for one in told),
    )
    queued_s = max(one.queued_s for one in told)
    return life if queued_s < 0.0 else _with_run(life, queued_s)


def _with_run(life: RequestLife, queued_s: float) -> RequestLife:
    """With the state that its frontend infers from its first token only."""
    queue_ms = max(life.queue_ms, _ms(queued_s))
    states = life.states
    if not any(one.state == "running" for one in states):
        received = datetime.fromisoformat(states[0].at)
        at = _shown(received + timedelta(milliseconds=queue_ms))
        states = [*states, RequestState(state="running", at=max(at, states[-1].at))]
    return msgspec.structs.replace(life, states=states, state=states[-1].state, queue_ms=queue_ms)


def _states(record: Record) -> Iterator[RequestState]:
    arrival = record.arrival

    def state(name: str, at: float) -> RequestState:
        return RequestState(state=name, at=_time(record.received + at - arrival))

    yield state("received", arrival)
    if record.accepted:
        yield state("queued", record.accepted)
    if record.first_token:
        yield state("running", max(arrival + record.queued_s, record.accepted))
        yield state("first_token", record.first_token)
    if record.ended:
        yield state(_end_of(record), record.ended)


def _end_of(record: Record) -> str:
    """The last state of a request that has ended."""
    if record.error is None:
        return "aborted" if "abort" in record.reasons else "finished"
    if record.error_code == ABORTED:
        return "aborted"
    return "refused" if REFUSED in record.reasons else "failed"


def _time(seconds: float) -> str:
    return _shown(datetime.fromtimestamp(seconds, UTC))


def _shown(when: datetime) -> str:
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _ms(seconds: float) -> float:
    return max(0.0, round(1000 * seconds, 1))
