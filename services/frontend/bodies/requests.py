"""The bodies that the generating routes take.

Checks, their messages, the JSON schema and the tables of ``docs/api.md`` follow from these
declarations; the sampling parameters in them from ``SamplingParams``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Meta

from penstock.client.cache_control import PromptCacheField
from penstock.client.messages import Messages, TemplateVariables
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
from penstock.client.tools import ToolChoiceField, ToolDeclarations
from penstock.protocol.declared import Declared, SameAs
from penstock.protocol.foreign_parameters import FOREIGN_PARAMETERS
from penstock.protocol.grammar.request import ResponseFormat, StructuredOutputs
from penstock.protocol.sampling import (
    MAX_CHOICES,
    PARAMETERS,
    Echo,
    Logprobs,
    MaxTokens,
    StopString,
    StopStrings,
)
from penstock.protocol.suggestions import ForeignNames
from penstock.protocol.validation import InvalidValue
from penstock.services.frontend.bodies.neutral import CHAT_NEUTRAL, COMPLETION_NEUTRAL
from penstock.services.frontend.bodies.sampling_fields import sampling_struct

MAX_METADATA = 16
MAX_METADATA_LENGTH = 512

_OTHERWISE = frozenset({"stop", "logprobs", "echo", "structured_outputs"})
"""Sampling parameters that a body writes in another way, or that one route alone has."""
SAMPLING_NAMES = tuple(name for name in PARAMETERS if name not in _OTHERWISE)

if TYPE_CHECKING:

    class _SamplingFields(Declared):
        """The sampling parameters that all bodies have."""
else:
    _SamplingFields = sampling_struct("_SamplingFields", dict.fromkeys(SAMPLING_NAMES, ""))

Flag = bool | None


def _said(description: str) -> Meta:
    return Meta(description=description)


class StreamOptions(Declared, kw_only=True):
    """What a stream says beside its text."""

    NEUTRAL: ClassVar[Mapping[str, Any]] = {"include_obfuscation": (False,)}

    include_usage: Annotated[Flag, _said("One more chunk at the end says the usage.")] = None
    continuous_usage_stats: Annotated[Flag, _said("Each chunk says the usage so far.")] = None


class GenerationBody(_SamplingFields, kw_only=True):
    """What the generating routes have in common."""

    FOREIGN: ClassVar[ForeignNames] = FOREIGN_PARAMETERS

    stop: StopString | StopStrings | None = None
    structured_outputs: (
        Annotated[StructuredOutputs, _said(PARAMETERS["structured_outputs"].description)] | None
    ) = None
    response_format: (
        Annotated[ResponseFormat, _said("Constrain the answer, as OpenAI's API has it.")] | None
    ) = None
    max_completion_tokens: Annotated[MaxTokens, _said("The same as max_tokens.")] | None = None
    model: Annotated[str, _said("The model, by one of its names.")] | None = None
    stream: Annotated[Flag, _said("Send the answer in pieces, as server-sent events.")] = None
    stream_options: (
        Annotated[StreamOptions, _said("What a stream says beside its text.")] | None
    ) = None
    return_token_ids: Annotated[
        Flag, _said("Return the ids of the prompt's tokens and of all generated ones.")
    ] = None
    use_beam_search: Annotated[
        Flag,
        _said("Search the likeliest answers as a whole, with n beams or best_of; not streamed."),
    ] = None
    length_penalty: (
        Annotated[
            float,
            Meta(ge=-10, le=10, description="Beams: above 0 longer answers are preferred."),
        ]
        | None
    ) = None
    early_stopping: Annotated[
        Flag, _said("Beams: end as soon as so many answers as beams have ended.")
    ] = None
    user: User | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    cache_control: PromptCacheField | None = None
    deadline_s: Seconds | None = None
    speculation: Speculation | None = None
    deterministic: Deterministic | None = None
    metadata: (
        Annotated[
            dict[str, Annotated[str, Meta(max_length=MAX_METADATA_LENGTH)]],
            Meta(max_length=MAX_METADATA, description="Has no effect."),
        ]
        | None
    ) = None
    service_tier: Annotated[Label, _said("Has no effect.")] | None = None
    safety_identifier: Annotated[Label, _said("Has no effect.")] | None = None
    prompt_cache_key: Annotated[Label, _said("Has no effect.")] | None = None

    def __post_init__(self) -> None:
        """Raise ``InvalidValue`` for what a type cannot say."""
        check_printable(self)
        if self.stream_options and not self.stream and self.stream_options != StreamOptions():
            raise InvalidValue(
                "stream_options are allowed only together with stream: true", "stream_options"
            )


class ChatBody(GenerationBody, kw_only=True):
    """The body of /v1/chat/completions."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...] | SameAs]] = CHAT_NEUTRAL

    messages: Messages
    logprobs: Annotated[Flag, _said("Return each token's logprob.")] = None
    top_logprobs: (
        Annotated[Logprobs, _said("So many of the likeliest tokens beside each, with logprobs.")]
        | None
    ) = None
    add_generation_prompt: (
        Annotated[
            bool, _said("End the prompt with the opening of an assistant's message (default).")
        ]
        | None
    ) = None
    continue_final_message: (
        Annotated[bool, _said("End the prompt with the last message's text, to be continued.")]
        | None
    ) = None
    chat_template_kwargs: (
        Annotated[
            TemplateVariables,
            _said("Variables of the chat template: enable_thinking, thinking, reasoning_effort."),
        ]
        | None
    ) = None
    tools: ToolDeclarations | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: (
        Annotated[bool, _said("Whether an answer may hold several calls (default).")] | None
    ) = None
    reasoning_effort: (
        Annotated[
            Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"],
            _said("How much to think, for chat templates that know it; none: not at all."),
        ]
        | None
    ) = None
    include_reasoning: (
        Annotated[bool, _said("Whether what the model thinks is sent (default).")] | None
    ) = None
    thinking_token_budget: (
        Annotated[int, Meta(ge=0, le=2**31 - 1, description="Tokens of thinking, at most.")] | None
    ) = None


_OF_CHATS = ("chat_template_kwargs", "enable_thinking", "reasoning_effort", "thinking")


class CompletionBody(GenerationBody, kw_only=True):
    """The body of /v1/completions."""

    FOREIGN: ClassVar[ForeignNames] = ForeignNames(
        FOREIGN_PARAMETERS.renamed,
        {
            **FOREIGN_PARAMETERS.explained,
            **dict.fromkeys(_OF_CHATS, "chat templates have it: use /v1/chat/completions"),
        },
    )
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...] | SameAs]] = COMPLETION_NEUTRAL

    prompt: Annotated[
        str | list[str | int | list[int]], _said("Text, token ids, or an array of either.")
    ]
    logprobs: Logprobs | None = None
    echo: Echo | None = None
    best_of: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=MAX_CHOICES,
                description="Generate so many choices and return the n whose tokens are likeliest.",
            ),
        ]
        | None
    ) = None
    parallel_tool_calls: Annotated[Flag, _said("Has no effect.")] = None
