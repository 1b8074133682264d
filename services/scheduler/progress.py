"""How far an open request is, for who asks why it is slow: found when it is asked, kept nowhere."""

from __future__ import annotations

import msgspec

from penstock.protocol.wire.messages.administration import Ask, EngineProgress, Told
from penstock.services.scheduler.registry import RequestRegistry
from penstock.services.scheduler.sequence import QueuePlace, Request, Sequence
from penstock.services.scheduler.waiting_queue import (
    ADAPTER,
    GRAMMAR,
    LOADING,
    PUT_OFF,
    WaitingQueue,
)

AWAITED = {GRAMMAR: "grammar", LOADING: "blocks", ADAPTER: "adapter"}
"""By the lane of what is put off."""


class ProgressOf:
    """Of the open requests of one engine."""

    def __init__(self, requests: RequestRegistry, waiting: WaitingQueue, engine: str) -> None:
        self._requests = requests
        self._waiting = waiting
        self._engine = engine

    def __call__(self, request_id: int) -> EngineProgress | None:
        """``None``: it is not open here."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        choices = list(request.open.values())
        places = [place for one in choices if (place := one.queue_place) is not None]
        place = min(places, default=None)
        return EngineProgress(
            id=request.id,
            engine=self._engine,
            to_prefill=_to_prefill(request, choices),
            queued_s=max((one.queued_s for one in choices if one.started_at), default=-1.0),
            cached=_cached(request, choices),
            preemptions=sum(one.preemptions for one in choices),
            waits_for="" if place is None else _awaited(place),
            ahead=-1 if place is None or place.rank == PUT_OFF else self._waiting.num_before(place),
        )


def told(asked: Ask, progress: ProgressOf | None) -> Told:
    """The answer to ``REQUEST_PROGRESS``. progress: ``None``: the engine has had no worker yet."""
    try:
        ids = msgspec.msgpack.decode(asked.about, type=list[int])
    except msgspec.MsgspecError:
        ids = []
    found = [one for number in ids if progress and (one := progress(number)) is not None]
    return Told(asked.number, msgspec.msgpack.encode(found) if found else b"")


def _awaited(place: QueuePlace) -> str:
    return AWAITED[place.lane] if place.rank == PUT_OFF else "slot"


def _to_prefill(request: Request, choices: list[Sequence]) -> int:
    left = [_left_of(one, request.head.virtual_tokens) for one in choices]
    return sum(left) if request.num_prompts > 1 else min(left)


def _left_of(choice: Sequence, virtual: int) -> int:
    if not choice.running and choice.queue_place is None:
        return 0  # all of it is planned, and its slot is given back
    return choice.prompt_len - max(virtual, min(choice.num_computed, choice.prompt_len))


def _cached(request: Request, choices: list[Sequence]) -> int:
    if any(one.num_output or one.first_token_at for one in choices):
        return 0
    found = (max(0, one.cached_tokens) for one in choices)
    return sum(found) if request.num_prompts > 1 else max(found)
