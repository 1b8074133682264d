"""What routes take and give that are about requests and the server itself."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from penstock.protocol.declared import Declared
from penstock.services.frontend.bodies.responses import Count, Given

Milliseconds = Annotated[float, Meta(ge=0)]


class RequestState(Given, kw_only=True):
    state: Annotated[
        str,
        Meta(
            description="received, queued (an engine has it), running, first_token; then finished, "
            "aborted, failed, or refused, which never ran."
        ),
    ]
    at: Annotated[str, Meta(description="RFC 3339, UTC.")]


class RequestLife(Given, kw_only=True):
    """What became of a request so far."""

    id: str
    object: Literal["request"] = "request"
    key: Annotated[str, Meta(description="The name of its key; empty where there are no keys.")]
    model: str
    state: Annotated[str, Meta(description="The last of states.")]
    states: list[RequestState]
    ahead: Annotated[
        Count | None,
        Meta(
            description="Before its first token: requests for the same model that came to the same "
            "frontend before it and have none yet either."
        ),
    ]
    choices: Count
    prompt_tokens: Count
    cached_tokens: Count
    output_tokens: Count
    queue_ms: Annotated[
        Milliseconds, Meta(description="From its arrival until an engine began; 0 before.")
    ]
    prefill_ms: Annotated[Milliseconds | None, Meta(description="From there to its first token.")]
    decode_ms: Annotated[Milliseconds | None, Meta(description="From there to its end.")]
    total_ms: Annotated[Milliseconds, Meta(description="Until its end, or until now.")]
    finish: Annotated[str | None, Meta(description="Why its choices ended, once they did.")]
    error: str | None
    engine: Annotated[
        str | None,
        Meta(description="Where it first ran, known from its first token on; several by commas."),
    ]
    preemptions: Annotated[
        Count | None,
        Meta(
            description="How often its engine took its KV memory for others and computed it anew; "
            "known at its end, null where a stop string ended it."
        ),
    ]
    continuations: Annotated[
        Count, Meta(description="How often it was continued elsewhere after a loss.")
    ]


class EmptyBody(Declared, kw_only=True):
    """Nothing is asked but the deed itself."""


class Aborted(Given, kw_only=True):
    id: str
    aborted: Annotated[Count, Meta(description="How many requests of this id were ended.")]


class Draining(Given, kw_only=True):
    status: Literal["draining"] = "draining"
    scope: Annotated[
        Literal["server", "frontend"],
        Meta(description="What ends; a frontend that was started by hand ends alone."),
    ]


class LogLevelBody(Declared, kw_only=True):
    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Least severe level that is logged, until it is changed or restarted."),
    ]


class LogLevel(Given, kw_only=True):
    level: str
    processes: Annotated[Count, Meta(description="How many took it.")]
