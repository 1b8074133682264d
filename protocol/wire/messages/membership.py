"""Who is alive: what every process says to the router, and what the router answers.

``Hello`` and ``Refused`` never change their layout, so that two builds with different protocols
can still tell each other why they do not get along.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import msgspec

from penstock.protocol.wire.messages.engine import Adapter, EngineSizes


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """First message of every process to the router. Its layout is frozen for ever."""

    service: str
    address: str
    incarnation: int
    protocol_version: int
    schema_hash: str
    identity: bytes
    """An encoded ``Identity``; read only when version and schema agree."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """The router does not admit the sender. Its layout is frozen for ever."""

    reason: str
    remedy: str


class Capacity(EngineSizes, frozen=True, array_like=True, gc=False):
    """What an engine can do."""

    tasks: list[str] = []
    """Tasks that it can do beside generating."""
    generates: bool = True
    """Whether it can generate."""
    labels: list[str] = []
    """What the scores of ``classify`` stand for, in their order."""
    adapters: list[Adapter] = []
    ends: list[int] = []
    """End tokens of the model."""
    repeats: bool = False
    """The answer of a seed has the same bits whatever else it computes."""

    @property
    def done(self) -> list[str]:
        """All tasks that it does, to generate included."""
        return [*(["generate"] if self.generates else []), *self.tasks]


class Demand(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a frontend has in the pipeline for a model, what an engine can run; or several of them
    together."""

    open: int = 0
    """Requests between their admission and their end."""
    waiting: int = 0
    """How many of the open requests wait for their first token."""
    waiting_tokens: int = 0
    """Prompt tokens of those that wait, as far as they are known."""
    ended: int = 0
    """Requests that have begun and ended, since the frontend started."""
    slots: int = 0
    """Sequences that an engine runs at once, or as many as its KV memory lets run."""
    model: str = ""
    held: int = 0
    """What waits in the router for a part of the model; only launchers are told."""


Role = Literal["both", "prefill", "decode"]


class Identity(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What does not change in the life of a process."""

    pid: int
    host: str
    engine: str = ""
    """Name of the engine that a scheduler or worker belongs to."""
    rank: int = 0
    model: str = ""
    """The first served name of the model, by which requests are routed; empty for a process without
    a model."""
    aliases: list[str] = []
    """Further names under which a scheduler serves the model."""
    http: str = ""
    """``host:port`` where a frontend listens."""
    fingerprint: str = ""
    """The fingerprint of the model's files; empty for a process without a model."""
    rendezvous: str = ""
    """``host:port`` where a worker of rank 0 lets the other ranks of its engine find it; empty for
    any other process."""
    role: Role = "both"
    """What a scheduler's engine is for: to compute prompts, to go on with them, or both."""

    def is_of(self, model: str) -> bool:
        """Whether the process serves the model. Where either says no name there is one model."""
        return not model or self.model in ("", model)


def is_among(model: str, served: Collection[str]) -> bool:
    """Whether a model is one of those that are served; an empty name stands for any."""
    return model in served or "" in served or (not model and bool(served))


class PrefixReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Which prefixes an engine's KV cache holds: all, or those that came and went lately.

    Versions count changes. Whoever knows all up to ``since``, or anything later than that, knows
    all up to ``version`` when it has taken this; whoever knows less waits for a report of all.
    """

    since: int
    """The version that this is a change of; 0: all that is held."""
    version: int
    held: bytes = b""
    """Digests, see ``penstock.protocol.prefix_digest``; those in latest use come last."""
    gone: bytes = b""
    """In a report of changes: digests of what is no longer held."""


class Phase:
    """Where a process stands in its life. A plain string on the wire."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    ASLEEP = "asleep"
    """Of a worker that has left its device and keeps what it needs to come back."""
    DRAINING = "draining"


class Sleep:
    """Where a model stands that is not awake. A plain string on the wire."""

    FALLING = "falling asleep"
    ASLEEP = "asleep"
    WAKING = "waking"


class Sleeper(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A model that is served though its engines are stopped: its launcher starts them again for the
    next request."""

    model: str
    aliases: list[str]
    state: str
    """See ``Sleep``."""
    capacity: Capacity
    """What an engine of it last said; before there was one, what its folder says."""
    wake_s: float = 0.0
    """Seconds from the beginning of this state until it is awake, as far as that is known."""
    reason: str = ""
    """Why it could not be woken. While there is one it is not tried again, and no request waits."""
    keeps_workers: bool = False
    """Whether its workers go on living, with weights in the host's memory."""


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """Sent by the beat thread of every process, also while its main thread is busy.

    Alive and stuck are two things: silence says dead; a beat whose ``item_age`` passes its
    ``item_limit`` says stuck.
    """

    address: str
    incarnation: int
    phase: str
    note: str
    """What the process is doing in this phase, for people: ``reading weights 45%``."""
    progress: int
    """Counts finished items (steps, batches, turns of the event loop)."""
    item_age: float
    """Seconds since the current item began; 0 when idle."""
    item_limit: float
    """Seconds that the current item may take before its process counts as stuck."""
    load: int
    """What is open here: choices of requests in engines and tokenizers, requests in frontends. The
    router sends where, for the slots there, it is the smallest."""
    capacity: Capacity
    metrics: bytes
    """An encoded ``MetricsReport``: absolute values, so a lost beat loses nothing."""
    membership_version: int
    """Version of the newest ``Members`` that the sender has seen from this router."""
    demands: list[Demand] = []
    """A frontend sends one for each model; a scheduler sends its own."""
    served: list[str] = []
    """See ``Members``: a new router learns it from whoever is still there."""
    prefixes: PrefixReport | None = None
    """What an engine's prefix cache holds; sent until the router has it."""
    unloading: list[str] = []
    """Of a launcher: models that it ends. They are withdrawn, though their processes are there."""
    sleepers: list[Sleeper] = []
    """Of a launcher: models that it has put to sleep."""


class BeatAnswer(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """The router heard a beat. A new ``router`` means that it was restarted."""

    router: int
    others: list[Demand] = []
    """For a frontend or a launcher: what all other processes said in their last beats, added up by
    model."""
    prefixes: int = 0
    """For an engine: the version of its prefixes that the router knows; 0: none."""


class WhoAreYou(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """The router does not know the sender of a beat: say ``Hello`` again."""

    router: int


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag=6, gc=False):
    """The sender has finished its work and leaves: nothing of it is lost."""

    incarnation: int


class Died(msgspec.Struct, frozen=True, array_like=True, tag=7, gc=False):
    """The launcher saw the end of its child by pidfd: no need to wait for silence."""

    pid: int
    host: str


class Fenced(msgspec.Struct, frozen=True, array_like=True, tag=8, gc=False):
    """The receiver was declared lost. It drops all state and exits."""

    incarnation: int


class Peer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One living process as the router knows it."""

    service: str
    address: str
    incarnation: int
    identity: Identity
    phase: str
    note: str
    capacity: Capacity
    load: int


class Members(msgspec.Struct, frozen=True, array_like=True, tag=9, gc=False):
    """The membership, or what has changed in it.

    Whoever joins gets the whole, and so does whoever says in a beat that it has missed a change:
    that repairs whatever got lost before. The others get changes.

    ``lost`` names the incarnations that were declared lost (newest last, bounded); one that left
    with ``Goodbye`` is in neither list.
    """

    router: int
    version: int
    peers: list[Peer]
    """All of them; of a change, those that have joined or changed."""
    lost: list[int]
    """All that are known; of a change, those lost by it."""
    since: int = 0
    """The version that this is a change of; 0: the whole membership."""
    gone: list[int] = []
    """In a change: incarnations that are no longer members, lost or not."""
    served: list[str] = []
    """Models of which a tokenizer and an engine have been ready at the same time, under this router
    or before it: what is not ready now has been, and may be again."""
    withdrawn: list[str] = []
    """Models that were served and are no more: their last process has left with ``Goodbye``, or
    their launcher ends them."""
    sleepers: list[Sleeper] = []
    """All models that sleep, also in a change."""


class Exemplar(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An observation of a histogram that belongs to a trace."""

    bucket: int
    trace_id: str
    value: float
    at: float
    """Seconds since 1970."""


class MetricSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One metric of one process. ``name`` is one of ``metric_declarations.METRICS``."""

    name: str
    labels: list[str]
    values: list[float]
    """A counter or gauge: one value. A histogram: a count for each bucket, then the sum."""
    exemplars: list[Exemplar] = []
    """Of a histogram: one for a bucket at most."""


class MetricsReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    samples: list[MetricSample]


class MetricsQuery(msgspec.Struct, frozen=True, array_like=True, tag=10, gc=False):
    reply_to: str


class ProcessMetrics(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The newest report of one living process, or of all the dead ones of a service together."""

    service: str
    incarnation: int
    """0 for the total of the dead."""
    report: MetricsReport
    number: int = 0
    """Which of its service's processes it is, from 0 on; a number that is free is given again."""


class MetricsAnswer(msgspec.Struct, frozen=True, array_like=True, tag=11, gc=False):
    processes: list[ProcessMetrics]


class Trace(msgspec.Struct, frozen=True, array_like=True, tag=12, gc=False):
    """Record what you do for so many seconds (``penstock.protocol.process.trace`` has the most),
    then send it to the observer ``reply_to``, a member."""

    reply_to: str
    seconds: float


class Traced(msgspec.Struct, frozen=True, array_like=True, tag=13, gc=False):
    """A piece of a recording, or the refusal to make one."""

    names: list[str]
    """What the names of the events stand for."""
    events: bytes
    """See ``penstock.protocol.process.trace.EVENT``."""
    dropped: int
    """Events that newer ones have overwritten."""
    more: bool
    """Another piece follows."""
    refused: str = ""
    """Why nothing is recorded."""
