"""What the routes of OpenAI's Responses API take, and the messages of a client's WebSocket."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from penstock.client.cache_control import PromptCacheField
from penstock.client.request_terms import (
    Deterministic,
    Label,
    Priority,
    Salt,
    Seconds,
    Speculation,
    User,
    check_printable,
)
from penstock.client.tools import MAX_TOOLS
from penstock.protocol.declared import NO_ITEMS, Declared
from penstock.protocol.foreign_parameters import FOREIGN_PARAMETERS
from penstock.protocol.sampling import (
    MAX_LOGPROBS,
    MAX_TOKENS,
    PARAMETERS,
    StopString,
    StopStrings,
)
from penstock.protocol.suggestions import ForeignNames
from penstock.services.frontend.bodies.openai_items import MAX_ITEMS, MAX_PARTS, Id, InputPart
from penstock.services.frontend.bodies.openai_tools import ChosenTool
from penstock.services.frontend.bodies.requests import Flag

MAX_METADATA = 16
MAX_KEY_LENGTH = 64
MAX_VALUE_LENGTH = 512
MAX_CLIENT_VALUE_LENGTH = 8192


def _said(description: str) -> Meta:
    return Meta(description=description)


class TextFormat(Declared, kw_only=True):
    """What the answer's text looks like."""

    IS_ONE_PARAM: ClassVar[bool] = True

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Declared, kw_only=True):
    NEUTRAL: ClassVar[Mapping[str, Any]] = {"verbosity": ("medium",)}

    format: TextFormat | None = None


class ReasoningOptions(Declared, kw_only=True):
    NEUTRAL: ClassVar[Mapping[str, Any]] = {"context": ("auto",), "mode": ("standard",)}

    effort: (
        Annotated[
            Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"],
            _said("How much to think, for chat templates that know it; none: not at all."),
        ]
        | None
    ) = None
    summary: (
        Annotated[
            Literal["auto", "concise", "detailed"],
            _said("Send what is thought as a summary too; it is not shortened."),
        ]
        | None
    ) = None
    generate_summary: (
        Annotated[Literal["auto", "concise", "detailed"], _said("The same as summary.")] | None
    ) = None


class ResponseStreamOptions(Declared, kw_only=True):
    NEUTRAL: ClassVar[Mapping[str, Any]] = {"include_obfuscation": (False,)}


Includable = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]

SAMPLING_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "truncate_prompt_tokens",
    "dynatemp_min",
    "dynatemp_max",
    "dynatemp_exponent",
    "nsigma",
    "top_a",
    "tfs",
    "eta_cutoff",
    "epsilon_cutoff",
    "typical_p",
    "smoothing_factor",
    "smoothing_curve",
    "xtc_threshold",
    "xtc_probability",
    "mirostat_mode",
    "mirostat_tau",
    "mirostat_eta",
    "skew",
    "temperature_last",
    "sampler_order",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_range",
    "dry_sequence_breakers",
    "no_repeat_ngram_size",
    "banned_strings",
)
"""Sampling parameters that the body takes as the other routes do."""


_FORM = 'use text.format: {"type": "json_schema", …}'
_THINKING = 'use reasoning: {"effort": …}'
_FOREIGN = ForeignNames(
    {
        name: "max_output_tokens" if known == "max_tokens" else known
        for name, known in FOREIGN_PARAMETERS.renamed.items()
        if name != "max_output_tokens"
    }
    | {
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "messages": "input",
        "logprobs": "include",
    },
    {
        **FOREIGN_PARAMETERS.explained,
        **dict.fromkeys(
            ("format", "guided_json", "json_schema", "response_format", "structured_outputs"), _FORM
        ),
        **dict.fromkeys(
            ("chat_template_kwargs", "enable_thinking", "reasoning_effort", "thinking"), _THINKING
        ),
    },
)


class PromptBody(Declared, kw_only=True):
    """What a prompt is made of."""

    FOREIGN: ClassVar[ForeignNames] = _FOREIGN
    NEUTRAL: ClassVar[Mapping[str, Any]] = {
        "conversation": (),
        "prompt": (),
    }

    model: Annotated[str, _said("The model, by one of its names.")] | None = None
    input: (
        Annotated[
            str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_ITEMS)],
            _said(
                "A user's text, or items: message, function_call, function_call_output, "
                "custom_tool_call, custom_tool_call_output, reasoning, item_reference."
            ),
        ]
        | None
    ) = None
    instructions: Annotated[str, _said("A system message before all else.")] | None = None
    previous_response_id: (
        Annotated[Id, _said("Continue the conversation of this response.")] | None
    ) = None
    truncation: (
        Annotated[
            Literal["auto", "disabled"],
            _said(
                "auto: a conversation that is too long loses its oldest parts; disabled (default): "
                "it is a 400."
            ),
        ]
        | None
    ) = None
    tools: (
        Annotated[
            list[dict[str, Any]],
            Meta(
                max_length=MAX_TOOLS, description="Tools of the types function, custom, namespace."
            ),
        ]
        | None
    ) = None
    tool_choice: (
        Annotated[
            Literal["none", "auto", "required"] | ChosenTool,
            _said("Whether a tool may or must be called, and which ones."),
        ]
        | None
    ) = None
    parallel_tool_calls: (
        Annotated[bool, _said("Whether an answer may hold several calls (default).")] | None
    ) = None
    text: Annotated[TextOptions, _said("format: text, json_object or json_schema.")] | None = None
    reasoning: Annotated[ReasoningOptions, _said("effort and summary.")] | None = None


class TokenCountBody(PromptBody, kw_only=True):
    """The body of /v1/responses/input_tokens."""

    NEUTRAL: ClassVar[Mapping[str, Any]] = {**PromptBody.NEUTRAL, "personality": ()}


if TYPE_CHECKING:

    class _Sampling(PromptBody):
        """They are; ``null`` is left out."""

        temperature: float | None = None
        top_p: float | None = None
        min_tokens: int | None = None
else:
    _Sampling = msgspec.defstruct(
        "_Sampling",
        [(name, PARAMETERS[name].type | None, None) for name in SAMPLING_NAMES],
        bases=(PromptBody,),
        module=__name__,
        kw_only=True,
    )


class ResponsesBody(_Sampling, kw_only=True):
    """The body of /v1/responses."""

    NEUTRAL: ClassVar[Mapping[str, Any]] = {
        **PromptBody.NEUTRAL,
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "context_management": NO_ITEMS,
        "image": (),
        "moderation": (),
        "prompt_cache_options": (),
    }

    max_output_tokens: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=MAX_TOKENS,
                description="Generate at most this many tokens, thinking included.",
            ),
        ]
        | None
    ) = None
    stop: StopString | StopStrings | None = None
    top_logprobs: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=MAX_LOGPROBS,
                description="So many of the likeliest tokens beside each, with logprobs.",
            ),
        ]
        | None
    ) = None
    include: (
        Annotated[
            list[Includable],
            Meta(
                max_length=MAX_METADATA,
                description="message.output_text.logprobs and reasoning.encrypted_content are "
                "given; the others are about tools that are not there.",
            ),
        ]
        | None
    ) = None
    store: (
        Annotated[bool, _said("Keep the response, to be continued and asked for (default).")] | None
    ) = None
    stream: Annotated[Flag, _said("Send the answer in pieces, as server-sent events.")] = None
    stream_options: Annotated[ResponseStreamOptions, _said("Has no effect.")] | None = None
    metadata: (
        Annotated[
            dict[
                Annotated[str, Meta(max_length=MAX_KEY_LENGTH)],
                Annotated[str, Meta(max_length=MAX_VALUE_LENGTH)],
            ],
            Meta(max_length=MAX_METADATA, description="Stands in the response again."),
        ]
        | None
    ) = None
    user: User | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    cache_control: PromptCacheField | None = None
    deadline_s: Seconds | None = None
    speculation: Speculation | None = None
    deterministic: Deterministic | None = None
    safety_identifier: Annotated[Label, _said("Stands in the response again.")] | None = None
    prompt_cache_key: Annotated[Label, _said("Stands in the response again.")] | None = None
    prompt_cache_retention: (
        Annotated[Literal["in_memory", "24h"], _said("Has no effect.")] | None
    ) = None
    service_tier: (
        Annotated[
            Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"],
            _said("Has no effect."),
        ]
        | None
    ) = None
    max_tool_calls: (
        Annotated[int, Meta(ge=0, description="Has no effect: the server calls no tools.")] | None
    ) = None
    client_metadata: (
        Annotated[
            dict[str, Annotated[str, Meta(max_length=MAX_CLIENT_VALUE_LENGTH)]],
            Meta(max_length=MAX_PARTS, description="Has no effect."),
        ]
        | None
    ) = None

    def __post_init__(self) -> None:
        """Raise ``InvalidValue`` for what a type cannot say."""
        check_printable(self)


class ResponseCreate(ResponsesBody, kw_only=True):
    """``response.create`` on a WebSocket: the body of /v1/responses, and two fields more."""

    type: Literal["response.create"]
    stream_id: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=MAX_KEY_LENGTH,
                description="The lane: requests of one "
                "lane follow each other, those of different lanes run at once.",
            ),
        ]
        | None
    ) = None
    generate: (
        Annotated[bool, _said("false: the prompt is computed and cached, nothing is generated.")]
        | None
    ) = None


class SteerMessage(Declared, kw_only=True):
    type: Literal["message"] = "message"
    role: Literal["user"]
    content: (
        Annotated[str, Meta(min_length=1)]
        | Annotated[list[InputPart], Meta(min_length=1, max_length=MAX_PARTS)]
    )


class ResponseSteer(Declared, kw_only=True):
    """``response.steer`` on a WebSocket."""

    type: Literal["response.steer"]
    previous_response_id: Id
    input: (
        Annotated[str, Meta(min_length=1)]
        | Annotated[list[SteerMessage], Meta(min_length=1, max_length=MAX_PARTS)]
    )
