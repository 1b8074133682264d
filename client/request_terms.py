"""What a client says of a request beside its prompt and its parameters, whatever API it uses.

A field of ``RequestHead`` that clients may set is declared here once more, with its bounds and what
it means; the bodies of the HTTP APIs that take it name it, and no dialect has to know of it.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.protocol.declared import said
from penstock.protocol.shown_values import show
from penstock.protocol.validation import InvalidValue
from penstock.protocol.wire.messages.requests import (
    CacheSalt,
    Inputs,
    Prompt,
    RequestHead,
    RequestPriority,
    kind_of,
)

MAX_USER_LENGTH = 128
MAX_DEADLINE_S = 86_400

Label = Annotated[str, Meta(max_length=MAX_USER_LENGTH)]
User = Annotated[Label, said("The tenant, where no API key decides.")]
Priority = Annotated[RequestPriority, said("A lower one goes first under the policy priority.")]
Salt = Annotated[CacheSalt, said("Requests with different salts share no cached prefix.")]
Speculation = Annotated[
    bool, said("Whether tokens may be drafted ahead, where the server does so; text is the same.")
]
Deterministic = Annotated[
    bool,
    said("The answer of a seed has the same bits whatever runs beside it, or a 400 says why not."),
]
Seconds = Annotated[
    float,
    Meta(
        gt=0,
        le=MAX_DEADLINE_S,
        description="Seconds from its arrival in which the whole answer must be there, or it ends "
        "with a 504; the server's own limit still holds.",
    ),
]


class RequestTerms(msgspec.Struct, frozen=True):
    """On what terms a client wants its request served."""

    user: str = ""
    priority: int = 0
    cache_salt: str = ""
    deadline_s: float | None = None
    """Seconds from its arrival in which the client wants the whole answer; ``None``: the server's
    own limit."""
    adapter: str = ""
    """Name of an adapter, where ``model`` does not choose it: in the library."""
    speculation: bool = True
    deterministic: bool = False


DEFAULT_TERMS = RequestTerms()


class Caller(msgspec.Struct, frozen=True):
    """Who asks."""

    request_id: str = ""
    key: str = ""
    """The tenant whose API key was sent; empty where no keys are configured."""
    address: str = ""
    """Where the request came from; empty: from this process."""
    trace: str = ""
    """W3C ``traceparent``; empty where there is none."""

    def tenant(self, user: str = "") -> str:
        """Whose request it is: that of the key, else of the user that is named, else of who has
        the address."""
        return self.key or user or (f"at {self.address}" if self.address else "")


def terms_of(body: Any, **own: Any) -> RequestTerms:
    """The terms that a body has fields for. ``own``: those that it writes in another way."""
    names = RequestTerms.__struct_fields__
    given = {name: getattr(body, name, None) for name in names} | own
    return RequestTerms(**{name: value for name, value in given.items() if value is not None})


def check_printable(body: Any) -> None:
    """Raise ``InvalidValue`` where a name in a body's terms could not stand in a log line."""
    for name in ("user", "cache_salt"):
        value = getattr(body, name, None)
        if value and not value.isprintable():
            raise InvalidValue(
                f"{name} is {show(value)}; printable characters alone are allowed", name
            )


def head_of(
    terms: RequestTerms,
    caller: Caller,
    prompt: Prompt | Inputs,
    *,
    model: str = "",
    task: str = "generate",
    streamed: bool = False,
    siblings: int = 1,
    time_left: float | None = None,
    age: float = 0.0,
) -> RequestHead:
    """What every process may need to know of a request.

    siblings: choices of the client's request, over all its prompts. time_left, age: in seconds.
    """
    return RequestHead(
        request_id=caller.request_id,
        model=model,
        task=task,
        prompt_kind=kind_of(prompt),
        adapter=terms.adapter,
        tenant=caller.tenant(terms.user),
        priority=terms.priority,
        cache_salt=_salt(caller.key, terms.cache_salt),
        time_left=time_left,
        age=age,
        trace=caller.trace,
        streamed=streamed,
        siblings=siblings,
        speculation=terms.speculation,
        deterministic=terms.deterministic,
    )


def _salt(key: str, given: str) -> str:
    """Callers with different API keys share no cached prefix: its speed would tell one of them
    what another has asked."""
    if not key:
        return given
    return hashlib.blake2b(f"{key}\0{given}".encode(), digest_size=16).hexdigest()
