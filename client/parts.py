"""The parts of the server that a request needs, and whether one that is not ready may be soon.

A request that comes while a part is being started again waits for it. One for which nothing can be
hoped is refused at once: the server was never ready, or a part is gone and none comes in its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from penstock.protocol.process.participant import Participant
from penstock.protocol.tasks import GENERATE, OF_TOKENIZERS
from penstock.protocol.wire.messages.membership import Peer, Phase, Sleep, Sleeper

JOIN_SECONDS = 5.0
"""A frontend that was just started may not have heard from the router yet."""
FAILED_STARTS = 3
"""A part whose processes ended so often before one was ready does not come up by itself."""
_SERVICES = {"tokenizer": "tokenizer", "engine": "scheduler"}
_STARTED_FOR = {"tokenizer": "tokenizer", "scheduler": "engine", "worker": "engine"}
_COMING = (Phase.STARTING, Phase.LOADING)


class Parts:
    """Router, tokenizers and engines of a model, as the membership shows them to this frontend."""

    def __init__(
        self,
        participant: Participant,
        restart_wait_s: float,
        now: float,
        model: str = "",
        wake_wait_s: float = 300.0,
    ) -> None:
        """``restart_wait_s``: the longest that a request waits for a part that is not ready.
        ``wake_wait_s``: the same for a model that sleeps. ``model``: empty for those of all models
        together."""
        self.out_since: float | None = None
        """When a part was found not ready, until all are again."""
        self._participant = participant
        self._model = model
        self._wait = restart_wait_s
        self._wake_wait = wake_wait_s
        self._sleeper: Sleeper | None = None
        """What was last said of the model while it sleeps, …"""
        self._sleeper_since = now
        """… and when that was new."""
        self._began = now
        self._ready_at = dict.fromkeys(_SERVICES, now)
        """When each part was last ready; one that was not yet may have been just before."""
        self._failed: Counter[str] = Counter()
        """Processes of a part that ended before they were ready, since it last was."""

    def states(self) -> dict[str, str]:
        """What each part is doing, for people: ``ready`` when one of its processes is."""
        participant = self._participant
        routers = participant.of("router")
        # Lost for the moment; requests wait for the next one.
        router = Phase.READY if participant.joined and not routers else _state(routers)
        return {
            "router": router,
            "tokenizer": _state(self._of("tokenizer")),
            "engine": self._engine_state(),
        }

    def _engine_state(self) -> str:
        state, sleepers = _state(self._of("scheduler")), self._participant.sleepers
        if state == Phase.READY or not sleepers:
            return state
        if self._model:
            return sleepers[self._model].state if self._model in sleepers else state
        awake = self._participant.served.keys() - sleepers.keys()
        return state if awake else Sleep.ASLEEP  # of all models together

    def _of(self, service: str) -> list[Peer]:
        return self._participant.of(service, model=self._model)

    def look(self, now: float) -> bool:
        """Take in the membership as it is now. Returns whether every part is ready."""
        states, sleeper = self.states(), self._participant.sleepers.get(self._model)
        if sleeper != self._sleeper:
            self._sleeper, self._sleeper_since = sleeper, now
        for name in _SERVICES:
            if states[name] == Phase.READY:
                self._ready_at[name] = now
                self._failed[name] = 0
        if all(state == Phase.READY for state in states.values()):
            self.out_since = None
        elif self.out_since is None:
            self.out_since = now
        return self.out_since is None

    def lost(self, gone: Iterable[Peer]) -> None:
        """Processes that are no longer members."""
        for peer in gone:
            is_part = peer.service in _STARTED_FOR and peer.identity.is_of(self._model)
            if is_part and peer.phase in _COMING:
                self._failed[_STARTED_FOR[peer.service]] += 1

    def hopeless(self, now: float, task: str = GENERATE) -> str:
        """Why a request cannot wait for the server to be ready; empty if it can. ``task``: one that
        a tokenizer does alone needs no engine."""
        participant, sleeper = self._participant, self._participant.sleepers.get(self._model)
        served = participant.has_served(self._model)
        if task in OF_TOKENIZERS and served and self.states()["tokenizer"] == Phase.READY:
            is_silent = participant.silence(now) > max(self._wait, JOIN_SECONDS)
            return self.explain(self._silence(now)) if is_silent else ""
        if sleeper is not None and sleeper.reason:
            return self.explain("it could not be woken, and the server's log says why")
        if not served:
            if self._model in participant.withdrawn:
                return f"the model {self._model!r} was unloaded"
            young = not participant.joined and now - self._began < min(JOIN_SECONDS, self._wait)
            return "" if young else self.explain("it has not been ready yet")
        longest = self._wait if sleeper is None else self._wake_wait
        if not longest:
            flag = "--restart-wait-s" if sleeper is None else "--wake-wait-s"
            return self.explain(f"{flag} 0 lets no request wait")
        if participant.silence(now) > longest:
            return self.explain(self._silence(now))
        for name, state in self.states().items():
            if name not in _SERVICES or state == Phase.READY:
                continue
            if name == "engine" and sleeper is not None:
                continue  # its launcher knows when it comes
            if self._failed[name] >= FAILED_STARTS:
                times = self._failed[name]
                return self.explain(f"{times} processes of the {name} ended before they were ready")
            absent = now - self._ready_at[name]
            if absent > self._wait and not self._is_coming(name):
                return self.explain(f"no {name} has come for {absent:.0f} s")
        return ""

    def waited_too_long(self, since: float, now: float) -> bool:
        """Whether a request that came at ``since`` has waited long enough for a part."""
        longest = self._wait if self._sleeper is None else self._wake_wait
        return self.out_since is not None and now - max(since, self.out_since) > longest

    def retry_after(self, now: float) -> float:
        """Seconds after which a client whose request is refused may try again: of a model that
        sleeps, when it is expected to be awake. One that could not be woken is not tried again for
        a while, which passes while it sleeps."""
        sleeper = self._sleeper
        if sleeper is None:
            return 1.0
        is_still = sleeper.state == Sleep.ASLEEP and not sleeper.reason
        return max(1.0, sleeper.wake_s - (0.0 if is_still else now - self._sleeper_since))

    def explain(self, cause: str) -> str:
        """The message for a client whose request is refused."""
        several = self._model and len(self._participant.served) > 1
        what = f"model {self._model!r}" if several else "server"
        return f"the {what} is not ready ({_listed(self.states())}): {cause}; try again"

    def too_late(self, now: float) -> str:
        """The same, for one that has waited."""
        waited = f"{self._wait:g} s (--restart-wait-s)"
        if self._sleeper is not None:
            waited = f"{self._wake_wait:g} s for it to wake (--wake-wait-s)"
        cause = f"the request has waited {waited}"
        if self._participant.silence(now) > JOIN_SECONDS:
            cause += f", and {self._silence(now)}"
        return self.explain(cause)

    def _silence(self, now: float) -> str:
        return f"the router has been silent for {self._participant.silence(now):.0f} s"

    def _is_coming(self, name: str) -> bool:
        """Whether a process of the part starts or loads; of an engine, with a worker of its own."""
        coming = [peer for peer in self._of(_SERVICES[name]) if peer.phase in _COMING]
        if name != "engine":
            return bool(coming)
        staffed = {peer.identity.engine for peer in self._of("worker")}
        return any(peer.identity.engine in staffed for peer in coming)


def _state(peers: list[Peer]) -> str:
    """``ready`` when one is; else what the first one is doing."""
    if not peers:
        return "absent"
    if any(peer.phase == Phase.READY for peer in peers):
        return Phase.READY
    return f"{peers[0].phase} {peers[0].note}".strip()


def _listed(states: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {state}" for name, state in states.items())
