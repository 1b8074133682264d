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
            description="Told by its engine: choices of other requests that start before its "
            "first one that waits for a slot; null: none waits for one. Told by the frontend, "
            "before its first token: requests for the same model that came to the same frontend "
            "before it and have none yet either."
        ),
    ]
    waits_for: Annotated[
        Literal["slot", "grammar", "blocks", "adapter"] | None,
        Meta(
            description="What a choice of it waits for in its engine's queue: a slot with KV "
            "memory, its grammar to be compiled, KV blocks to be loaded, its adapter; null: none "
            "waits, or no engine has told."
        ),
    ] = None
    told_by: Annotated[
        Literal["engine", "frontend"],
        Meta(
            description="Whether the engines of all that has not ended have told how far they are, "
            "or the frontend what it knows alone."
        ),
    ] = "frontend"
    choices: Count
    prompt_tokens: Count
    cached_tokens: Count
    prefilled_tokens: Annotated[
        Count | None,
        Meta(
            description="Tokens of its prompts that its engine has begun to compute, or found in "
            "the cache; fewer again after a preemption; null where the engine does not tell."
        ),
    ] = None
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
        Meta(
            description="Where it waits or first ran, and what it was handed over to; several by "
            "commas. Where the engine does not tell, known from its first token on."
        ),
    ]
    hand_over_ms: Annotated[
        Milliseconds | None,
        Meta(
            description="Its pause between the prefill engine and the one that decodes; null: it "
            "was not handed over."
        ),
    ]
    preemptions: Annotated[
        Count | None,
        Meta(
            description="How often its engine took its KV memory for others and computed it anew; "
            "null where it runs and its engine does not tell, or a stop string ended it."
        ),
    ]
    continuations: Annotated[
        Count,
        Meta(
            description="How often it went on elsewhere after the loss of a process that had it: a "
            "tokenizer, an engine, or a router that it waited at. Of several prompts and choices "
            "each one's losses count."
        ),
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


MAX_WAIT_S = 3600.0
Wait = Annotated[
    float,
    Meta(
        ge=0,
        le=MAX_WAIT_S,
        description="Answer when it is done, or after so many seconds; 0: at once.",
    ),
]


class LoadModelBody(Declared, kw_only=True):
    model: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=4096,
            description="Its folder below one of --model-dirs: absolute, or relative to that.",
        ),
    ]
    name: Annotated[
        str,
        Meta(max_length=256, description="Under which it is served; by default the folder's name."),
    ] = ""
    memory_share: Annotated[
        float,
        Meta(ge=0, le=1, description="As of --memory-share; 0: what is left."),
    ] = 0.0
    wait_s: Wait = 0.0


class UnloadModelBody(Declared, kw_only=True):
    model: Annotated[
        str, Meta(min_length=1, max_length=256, description="One of the model's names.")
    ]
    wait_s: Wait = 0.0


ModelName = Annotated[
    str,
    Meta(max_length=256, description="One of the model's names; where there is one model, empty."),
]
WaitForState = Annotated[
    float,
    Meta(ge=0, le=MAX_WAIT_S, description="Answer when it is done, or after so many seconds."),
]


class SleepBody(Declared, kw_only=True):
    model: ModelName = ""
    level: Annotated[
        Literal[2],
        Meta(description="2: the weights are given up as well; level 1 of vLLM is not done."),
    ] = 2
    wait_s: WaitForState = 600.0


class WakeBody(Declared, kw_only=True):
    model: ModelName = ""
    wait_s: WaitForState = 600.0


class IsSleeping(Given, kw_only=True):
    is_sleeping: Annotated[bool, Meta(description="Whether it is not awake.")]
    state: Annotated[str, Meta(description="ready, falling asleep, asleep or waking.")]


class LoadAdapterBody(Declared, kw_only=True):
    lora_name: Annotated[
        str, Meta(min_length=1, max_length=256, description="Under which it is served.")
    ]
    lora_path: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=4096,
            description="Its folder below one of --lora-dirs: absolute, or relative to that.",
        ),
    ]
    load_inplace: Annotated[
        bool,
        Meta(description="Take the place of an adapter of that name, whose requests end with it."),
    ] = False


class UnloadAdapterBody(Declared, kw_only=True):
    lora_name: Annotated[str, Meta(min_length=1, max_length=256, description="Its name.")]


class ModelStateBody(Given, kw_only=True):
    """A model that the server's launcher runs, or has failed to load."""

    id: str
    object: Literal["model_state"] = "model_state"
    aliases: list[str]
    folder: str
    state: Annotated[
        str,
        Meta(
            description="loading, ready, draining (it takes no more requests, and ends), unloaded, "
            "or failed; of a model that sleeps: falling asleep, asleep, or waking."
        ),
    ]
    seconds: Annotated[float, Meta(ge=0, description="Since it came into this state.")]
    reason: Annotated[str | None, Meta(description="Why it has failed, or could not be woken.")]
    note: Annotated[
        str | None, Meta(description="What its processes are doing that are not ready.")
    ]


class ModelStates(Given, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelStateBody]
