"""What a frontend asks other processes: about a request, to change the log's level, and to load or
unload a model; and what a host asks that joins a server."""

from __future__ import annotations

from typing import Literal

import msgspec

LOG_LEVEL = "log_level"
"""Every process: log from this level on. About: its name."""
FIND_REQUEST = "find_request"
"""A frontend: what became of a request. About: an encoded ``RequestName``. Answer: an encoded
``FoundRequest``."""
REQUEST_PROGRESS = "request_progress"
"""A scheduler: how far it is with requests. About: an encoded list of their ids, as processes know
them. Answer: an encoded list of ``EngineProgress``, of those that are open there."""
ABORT_REQUESTS = "abort_requests"
"""A frontend: end them. About: encoded ``RequestNames``. Answer: an encoded list of numbers, of
each name how many ran."""
MODEL_STATES = "model_states"
"""The launcher: which models it runs. Answer: an encoded ``ModelAnswer``, as for the next two."""
LOAD_MODEL = "load_model"
"""The launcher: run one more. About: an encoded ``LoadModel``."""
UNLOAD_MODEL = "unload_model"
"""The launcher: end one. About: its name."""
SLEEP_MODEL = "sleep_model"
"""The launcher: stop the engines of one until its next request. About: its name. Answer: as above,
as for the next."""
WAKE_MODEL = "wake_model"
"""The launcher: start them again. About: its name."""

ADMIT_ADAPTER = "admit_adapter"
"""The launcher: may an adapter be loaded? About: an encoded ``AdapterPlace``. Answer: an encoded
``AdapterAnswer``, as for the next two."""
KEEP_ADAPTER = "keep_adapter"
"""The launcher: let workers that it starts from now on have this one. About: the same."""
FORGET_ADAPTER = "forget_adapter"
"""The launcher: or no longer have the one of this name. About: the same, without a folder,
or with ``load`` to undo what that load has changed. Both answer with the folder that it had."""
LOAD_ADAPTER = "load_adapter"
"""A scheduler: load one, or tell how far it is. About: an encoded ``AdapterPlace``. Answer: an
encoded ``AdapterProgress``."""
UNLOAD_ADAPTER = "unload_adapter"
"""A scheduler: take no more requests for one. About: its name. Answer: an encoded
``AdapterProgress``."""

JOIN_HOST = "join_host"
"""The launcher of the first host: give another one its part. About: an encoded ``HostOffer``.
Answer: an encoded ``HostPart``."""


class RequestName(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request as its client knows it."""

    id: str
    owner: str | None = None
    """Whose it must be; ``None``: anybody's."""


class FoundRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a frontend knows of a request."""

    life: bytes
    """As the route answers, in JSON."""
    open_ids: list[int] = []
    """What of it has not ended: ids that engines know."""


class EngineProgress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How far an engine is with a request, over those of its choices that have not ended."""

    id: int
    engine: str
    to_prefill: int
    """Tokens of its prompts that no plan has taken up, nor the prefix cache held; of one prompt
    with several choices, for the choice that is furthest."""
    queued_s: float = -1.0
    """Seconds from its arrival until the last of its choices began that has begun; -1: none has."""
    cached: int = 0
    """Tokens of its prompts that the prefix cache held, while it has no token yet; else 0."""
    preemptions: int = 0
    waits_for: str = ""
    """What the next of its choices that waits is waiting for: ``slot``, ``grammar``, ``blocks`` or
    ``adapter``; empty: none waits."""
    ahead: int = -1
    """Choices of others that start before that one, where it waits for a slot; else -1."""


class RequestNames(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Requests as one client knows them."""

    ids: list[str]
    """Each once."""
    owner: str | None = None
    """As of a ``RequestName``."""


class LoadModel(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A model that a launcher is to run beside those that it runs."""

    folder: str
    """Below one of the launcher's ``--model-dirs``; absolute, or relative to one of them."""
    name: str = ""
    """Under which it is served; empty: its folder's."""
    memory_share: float = 0.0
    """As of ``--memory-share``; 0: what is left."""


class ModelState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A model that a launcher runs, or has failed to load."""

    name: str
    aliases: list[str]
    folder: str
    state: str
    """``loading``, ``ready``, ``draining`` or ``failed``; or where it sleeps, one of ``Sleep``."""
    seconds: float
    """Since it came into this state."""
    reason: str = ""
    """Why it has failed, or could not be woken."""
    note: str = ""
    """What its processes are doing, while it is loading or draining."""


class ModelAnswer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a launcher says of its models."""

    models: list[ModelState] = []
    """All of them; the one that was asked for alone where it is loaded or unloaded."""
    status: int = 200
    """The HTTP status of a refusal; 200: it is none."""
    code: str = ""
    message: str = ""
    """Why it is refused, and what to do."""


class AdapterPlace(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An adapter that is to be loaded."""

    name: str
    folder: str = ""
    load: str = ""
    """Which load of it this is about: who asks again how far it is says the same."""


class AdapterAnswer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a launcher says of an adapter."""

    folder: str = ""
    """Where it lies, without links."""
    status: int = 200
    """The HTTP status of a refusal; 200: it is none."""
    code: str = ""
    message: str = ""


class AdapterProgress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How far an engine is with an adapter."""

    state: Literal["loading", "loaded", "failed", "gone"]
    digest: str = ""
    """Of one that is loaded."""
    reason: str = ""
    """Why it could not be."""


class HostOffer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A host that is to have a part of a server."""

    host: str
    """Its name, for people."""
    devices: int
    """CUDA devices that it has for it."""


class HostProcess(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A process that a host starts."""

    service: str
    """``worker`` or ``scheduler``."""
    number: int
    environment: dict[str, str]
    """Its settings, but for those that belong to the host: addresses, secret, device, log."""


class HostPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a host is to do; nothing yet while there is something to wait for."""

    processes: list[HostProcess] = []
    folder: str = ""
    """Of the model on the first host."""
    fingerprint: str = ""
    """Of the folder's files, which must be the same on all hosts."""
    waiting: str = ""
    """What is waited for; ask again."""
    refused: str = ""
    """Why there is no part for the host, and what to do."""


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=14, gc=False):
    """A process that does not know what it is asked answers that it has nothing."""

    reply_to: str
    number: int
    """The answer has the same."""
    what: str
    about: bytes = b""


class Told(msgspec.Struct, frozen=True, array_like=True, tag=15, gc=False):
    """The answer to ``Ask``."""

    number: int
    answer: bytes = b""
    """Empty: there is nothing."""
