"""One model as this frontend sees it: whether it can be asked, and what waits for it.

What waits for one model refuses no request for another.
"""

from __future__ import annotations

from penstock.client.admission import AdmissionController, PipelineLoad
from penstock.client.parts import Parts
from penstock.protocol.config.fields import AdmissionConfig
from penstock.protocol.process.participant import Participant
from penstock.protocol.wire.messages.membership import Demand, Phase, Sleep

_NOTHING = Demand()
RESTING = frozenset({Sleep.FALLING, Sleep.ASLEEP, Sleep.WAKING})
"""States of a model that takes requests, though it is not awake."""


class ModelState:
    """The parts of a model, and the queue before them."""

    def __init__(
        self, participant: Participant, limits: AdmissionConfig, name: str, now: float
    ) -> None:
        self.name = name
        self.parts = Parts(participant, limits.restart_wait_s, now, name, limits.wake_wait_s)
        self.admission = AdmissionController(limits)
        self.longest = 2**31
        """Tokens of the longest prompt that an engine takes."""
        self._participant = participant

    def look(self, requests: int, choices: int, now: float) -> Demand:
        """Tell the admission controller what the membership says, and that ``requests`` with
        ``choices`` are open here. Returns what the other frontends should know of that."""
        participant = self._participant
        engines = participant.of("scheduler", ready_only=True, model=self.name)
        self.longest = max((e.capacity.max_model_len for e in engines), default=0) or self.longest
        others = participant.others.get(self.name, _NOTHING)
        slots = others.slots or sum(engine.capacity.max_num_seqs for engine in engines)
        load = PipelineLoad(
            slots=slots * requests / choices if choices else float(slots),
            kv_tokens=sum(engine.capacity.all_kv_tokens for engine in engines),
            frontends=1 + len(participant.of("frontend")),
            others=others,
        )
        self.admission.look(load, requests, now)
        return self.admission.demand(requests, self.name)

    def what_lacks(self) -> str:
        """``ready``, or what the part is doing that is not; of a model that sleeps, that alone."""
        states = self.parts.states()
        if states["engine"] in RESTING and states["tokenizer"] == Phase.READY:
            sleeper = self._participant.sleepers.get(self.name)
            failed = sleeper is not None and bool(sleeper.reason)
            return f"{states['engine']}: could not be woken" if failed else states["engine"]
        lacking = [f"{name}: {state}" for name, state in states.items() if state != Phase.READY]
        return ", ".join(lacking) or Phase.READY


def is_up(state: str, *, alone: bool) -> bool:
    """Whether ``what_lacks``, or the state of a part, is no obstacle for requests. ``alone``: this
    model is asked for; among others one that could not be woken makes no server unready."""
    return state == Phase.READY or (state if alone else state.partition(":")[0]) in RESTING
