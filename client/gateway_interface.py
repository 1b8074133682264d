"""What the HTTP side needs of the rest of the system, which ``gateway.py`` gives.

The HTTP side opens a request with a ``Sink``; the gateway calls it on the event loop, in order,
until the request has ended or was cancelled.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from penstock.client.sink import Sink
from penstock.protocol.wire.messages.engine import Adapter
from penstock.protocol.wire.messages.membership import MetricsAnswer, Peer
from penstock.protocol.wire.messages.requests import Rejected, Work


class ServedModel(msgspec.Struct, frozen=True):
    name: str
    aliases: list[str]
    max_model_len: int
    vocab_size: int
    tasks: list[str] = []
    """What its engines do beside to generate."""
    generates: bool = True
    labels: list[str] = []
    """What the scores of the task ``classify`` stand for, in their order."""
    longest_task_prompt: int = 2**31
    """Tokens of a prompt that a task gets, at most."""
    adapters: list[Adapter] = []
    """Those that an engine has loaded for it: each is served as a model of its own, too."""
    parent: str = ""
    """Of an adapter: the model that it is added to."""
    ends: list[int] = []
    """Its end tokens."""
    sleep: str = ""
    """Of a model that sleeps: where it stands between being awake and being awake again."""
    repeats: bool = False
    """An engine of it repeats the answer of a seed bit for bit."""


class Readiness(msgspec.Struct, frozen=True):
    """Whether the system can serve; ``parts`` says what each part is doing, for people."""

    ready: bool
    parts: dict[str, str]
    models: dict[str, str] = {}
    """``ready``, or what a model lacks."""


class Overloaded(Exception):
    """The frontend is full, no engine is ready, or none does the task. Carries the answer for the
    client."""

    def __init__(self, rejected: Rejected) -> None:
        super().__init__(rejected.message)
        self.rejected = rejected


class Gateway(Protocol):
    """What the HTTP side needs from the rest of the system."""

    is_closed: bool
    """This process ends now: nothing is opened any more."""

    def open(self, work: Work, sink: Sink) -> int:
        """Start a request with all choices in ``work.choices`` and return its id.

        Raises ``Overloaded``.
        """
        ...

    async def known(self, name: str = "") -> None:
        """Wait until it is known what the engines serve, as it is not just after a frontend was
        started; with a name until it is known whether that is a model. Raises ``Overloaded`` when
        it cannot be waited for."""

    def cancel(self, request_id: int) -> None:
        """Idempotent. The sink is not called afterwards."""

    def models(self) -> list[ServedModel]: ...

    def ready(self, name: str = "") -> Readiness:
        """Ready when a router, and of the model of that name a tokenizer and an engine, are, and
        this process stays. Without a name: of every model that is expected or was ever ready."""
        ...

    async def metrics(self) -> MetricsAnswer: ...

    async def ask(self, service: str, what: str, about: bytes) -> list[bytes]:
        """Ask all other processes of a service, or of all services where it is empty, and return
        what those say that have an answer (``penstock.protocol.wire.messages.administration``)."""
        ...

    def members(self) -> list[Peer]:
        """The living processes, this one among them."""
        ...

    def draining(self) -> bool:
        """The process finishes what it has and takes no new connections."""
        ...
