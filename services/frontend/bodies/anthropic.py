"""What the routes of Anthropic's Messages API take.

Blocks of content are objects of several types; each type's own fields are listed in
``BLOCK_FIELDS``. As elsewhere, what asks for nothing is accepted and everything else is honoured or
refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from penstock.client.cache_control import CacheControl, PromptCacheField
from penstock.client.messages import MAX_MESSAGES, MAX_PARTS, Name
from penstock.client.request_terms import Deterministic, Label, Priority, Salt, Seconds
from penstock.client.tools import MAX_TOOLS, ToolName
from penstock.protocol.declared import NO_ITEMS, Declared
from penstock.protocol.foreign_parameters import FOREIGN_PARAMETERS
from penstock.protocol.sampling import Seed, StopStrings, TopK, TopP
from penstock.protocol.shown_values import show
from penstock.protocol.suggestions import ForeignNames
from penstock.protocol.validation import InvalidValue
from penstock.protocol.wire.messages.tokens import MAX_CALLS

MAX_USER_ID = 512
MIN_THINKING_BUDGET = 1024
MAX_EDITS = 16
MAX_BLOCKS = 4 * MAX_CALLS
"""Of one message: calls with text and thinking between them, or their results."""

_FOREIGN = ForeignNames(
    FOREIGN_PARAMETERS.renamed_to(stop="stop_sequences", max_tokens="max_tokens")
    | {"max_completion_tokens": "max_tokens"},
    {
        "guided_json": "use output_config.format",
        "container": "code is not executed here",
        "mcp_servers": "call MCP servers in the client, and offer their tools as custom tools",
        "output_format": "use output_config.format",
        "response_format": "use output_config.format",
        "thread": "send the whole conversation: its prefix is cached by itself",
    },
)


def check_field_of_type(declared: Any, fields: Mapping[str, str], param: str) -> None:
    """Raise ``InvalidValue`` unless a struct has the field of its type, and that of no other.

    fields: by the types. param: the request's field at fault.
    """
    for kind, name in fields.items():
        if (getattr(declared, name) is None) == (kind == declared.type):
            wrong = "is missing" if kind == declared.type else "is not allowed"
            raise InvalidValue(f"{name} {wrong} with the type {declared.type!r}", param)


class SystemBlock(Declared, kw_only=True):
    NEUTRAL: ClassVar[Mapping[str, Any]] = {"citations": NO_ITEMS}

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class ResultPart(Declared, kw_only=True):
    """A part of what a tool has given: a text, an image, or a tool to be offered from then on."""

    NEUTRAL: ClassVar[Mapping[str, Any]] = {"citations": NO_ITEMS}

    type: Literal["text", "image", "tool_reference"]
    text: str | None = None
    source: (
        Annotated[dict[str, Any], Meta(description="Has no effect: an image is not seen.")] | None
    ) = None
    tool_name: Annotated[ToolName, Meta(description="Which of the tools.")] | None = None
    cache_control: CacheControl | None = None

    def __post_init__(self) -> None:
        """Raise ``InvalidValue`` where the type and the rest contradict each other."""
        fields = {"text": "text", "image": "source", "tool_reference": "tool_name"}
        check_field_of_type(self, fields, "messages")


class CustomTool(Declared, kw_only=True):
    """A tool that the client calls."""

    NEUTRAL: ClassVar[Mapping[str, Any]] = {
        "allowed_callers": (["direct"], []),
        "input_examples": NO_ITEMS,
    }

    type: Literal["custom"] = "custom"
    name: ToolName
    description: Annotated[str, Meta(description="What it does, for the model.")] | None = None
    input_schema: Annotated[dict[str, Any], Meta(description="A JSON schema of its arguments.")]
    strict: Annotated[bool, Meta(description="The input must be what the schema says.")] | None = (
        None
    )
    defer_loading: (
        Annotated[bool, Meta(description="Not offered before the conversation names it.")] | None
    ) = None
    eager_input_streaming: (
        Annotated[bool, Meta(description="Has no effect: input is sent as it comes.")] | None
    ) = None
    cache_control: CacheControl | None = None


class ToolChange(Declared, kw_only=True):
    """A tool that is offered, or not any more, from some place of the conversation on."""

    type: Literal["tool_reference", "tool_definition"]
    name: Annotated[ToolName, Meta(description="Which of the tools.")] | None = None
    definition: Annotated[CustomTool, Meta(description="A tool that is new.")] | None = None

    def __post_init__(self) -> None:
        """Raise ``InvalidValue`` where the type and the rest contradict each other."""
        fields = {"tool_reference": "name", "tool_definition": "definition"}
        check_field_of_type(self, fields, "messages")


class Block(Declared, kw_only=True):
    """A block of a message's content: text, a call, its result, what was thought, or a tool that
    comes or goes."""

    NEUTRAL: ClassVar[Mapping[str, Any]] = {
        "citations": NO_ITEMS,
        "caller": ({"type": "direct"},),
        "toolset_name": (),
    }

    type: Literal[
        "text",
        "tool_use",
        "tool_result",
        "thinking",
        "redacted_thinking",
        "tool_addition",
        "tool_removal",
    ]
    text: str | None = None
    id: Name | None = None
    name: Name | None = None
    input: Annotated[dict[str, Any], Meta(description="The arguments of a call.")] | None = None
    tool_use_id: Annotated[Name, Meta(description="Which call a result is of.")] | None = None
    content: (
        Annotated[
            str | Annotated[list[ResultPart], Meta(max_length=MAX_PARTS)],
            Meta(description="What the tool has given."),
        ]
        | None
    ) = None
    is_error: Annotated[bool, Meta(description="The tool has failed.")] | None = None
    thinking: str | None = None
    signature: str | None = None
    data: Annotated[str, Meta(description="Has no effect.")] | None = None
    tool: Annotated[ToolChange, Meta(description="Which tool comes or goes.")] | None = None
    cache_control: CacheControl | None = None


BLOCK_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "text": (("text",), ()),
    "tool_use": (("id", "name", "input"), ()),
    "tool_result": (("tool_use_id",), ("content", "is_error")),
    "thinking": (("thinking", "signature"), ()),
    "redacted_thinking": (("data",), ()),
    "tool_addition": (("tool",), ()),
    "tool_removal": (("tool",), ()),
}
"""The fields that a block of each type must have, and those that it may have."""


class InputMessage(Declared, kw_only=True):
    role: Annotated[Literal["user", "assistant", "system"], Meta(description="Who speaks.")]
    content: Annotated[
        str | Annotated[list[Block], Meta(max_length=MAX_BLOCKS)],
        Meta(description="Text, or blocks."),
    ]


class ToolSelection(Declared, kw_only=True):
    """Whether a tool may or must be called."""

    IS_ONE_PARAM: ClassVar[bool] = True

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: (
        Annotated[bool, Meta(description="At most one call in an answer.")] | None
    ) = None

    def __post_init__(self) -> None:
        """Raise ``InvalidValue`` where the type and the name contradict each other."""
        if (self.name is None) == (self.type == "tool"):
            wrong = "is missing" if self.name is None else "is allowed only with the type 'tool'"
            raise InvalidValue(f"tool_choice.name {wrong}", "tool_choice")


class Thinking(Declared, kw_only=True):
    """Whether the model thinks before it answers."""

    IS_ONE_PARAM: ClassVar[bool] = True
    NEUTRAL: ClassVar[Mapping[str, Any]] = {"block_binding": ({},)}

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: (
        Annotated[
            int,
            Meta(ge=MIN_THINKING_BUDGET, le=2**31 - 1, description="Tokens of thinking, at most."),
        ]
        | None
    ) = None
    display: (
        Annotated[
            Literal["summarized", "updates", "omitted"],
            Meta(description="Whether what is thought is sent; it is never summarized."),
        ]
        | None
    ) = None

    def __post_init__(self) -> None:
        """Raise ``InvalidValue`` where the type and the rest contradict each other."""
        if (self.budget_tokens is None) == (self.type == "enabled"):
            wrong = "is missing" if self.budget_tokens is None else "is allowed only with the type"
            raise InvalidValue(f"thinking.budget_tokens {wrong}: 'enabled' needs it", "thinking")
        if self.display is not None and self.type == "disabled":
            raise InvalidValue("thinking.display is not allowed with 'disabled'", "thinking")


class JsonFormat(Declared, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Declared, kw_only=True):
    IS_ONE_PARAM: ClassVar[bool] = True

    effort: (
        Annotated[
            Literal["low", "medium", "high", "xhigh", "max"],
            Meta(description="How much to think, for chat templates that know it."),
        ]
        | None
    ) = None
    format: Annotated[JsonFormat, Meta(description="The answer is JSON of a schema.")] | None = None


class Metadata(Declared, kw_only=True):
    user_id: (
        Annotated[
            str, Meta(max_length=MAX_USER_ID, description="The tenant, where no API key decides.")
        ]
        | None
    ) = None

    def __post_init__(self) -> None:
        if self.user_id and not self.user_id.isprintable():
            raise InvalidValue(
                f"metadata.user_id is {show(self.user_id)}; printable characters alone are allowed",
                "metadata",
            )


class AllTurns(Declared, kw_only=True):
    type: Literal["all"]


class ContextEdit(Declared, kw_only=True):
    """Which thinking to forget: none, since the client sends what the model is to see."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | AllTurns


class ContextManagement(Declared, kw_only=True):
    edits: Annotated[list[ContextEdit], Meta(max_length=MAX_EDITS)] | None = None


class ConversationBody(Declared, kw_only=True):
    """What is counted, and what is answered."""

    FOREIGN: ClassVar[ForeignNames] = _FOREIGN
    NEUTRAL: ClassVar[Mapping[str, Any]] = {
        "container": (),
        "mcp_servers": NO_ITEMS,
        "diagnostics": (),
        "output_format": (),
        "speed": ("standard",),
        "fallbacks": NO_ITEMS,
        "thread": (),
    }

    model: Annotated[str, Meta(description="The model, by one of its names.")] | None = None
    messages: Annotated[
        list[InputMessage],
        Meta(min_length=1, max_length=MAX_MESSAGES, description="The conversation, oldest first."),
    ]
    system: (
        Annotated[
            str | Annotated[list[SystemBlock], Meta(max_length=MAX_PARTS)],
            Meta(description="What stands before the conversation."),
        ]
        | None
    ) = None
    tools: (
        Annotated[
            list[CustomTool],
            Meta(max_length=MAX_TOOLS, description="Tools that the model may call."),
        ]
        | None
    ) = None
    tool_choice: (
        Annotated[ToolSelection, Meta(description="Whether a tool may or must be called.")] | None
    ) = None
    thinking: (
        Annotated[Thinking, Meta(description="Whether the model thinks; without it: no.")] | None
    ) = None
    output_config: (
        Annotated[OutputConfig, Meta(description="The effort, and the answer's form.")] | None
    ) = None
    cache_control: PromptCacheField | None = None
    context_management: (
        Annotated[ContextManagement, Meta(description="May keep all, and has no effect then.")]
        | None
    ) = None
    cache_salt: Salt | None = None


class CountTokensBody(ConversationBody, kw_only=True):
    """The body of /v1/messages/count_tokens."""


class MessagesBody(ConversationBody, kw_only=True):
    """The body of /v1/messages."""

    max_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=2**31 - 1,
            description="Generate at most this many tokens; 0, with cache_control, only computes "
            "the prompt.",
        ),
    ]
    stop_sequences: (
        Annotated[StopStrings, Meta(description="Stop before any of these strings.")] | None
    ) = None
    temperature: (
        Annotated[
            float,
            Meta(ge=0, le=1, description="The logits are divided by it; 0 takes the likeliest."),
        ]
        | None
    ) = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    seed: Seed | None = None
    stream: (
        Annotated[bool, Meta(description="Send the answer in pieces, as server-sent events.")]
        | None
    ) = None
    metadata: Annotated[Metadata, Meta(description="Who asks.")] | None = None
    service_tier: Annotated[Label, Meta(description="Has no effect.")] | None = None
    inference_geo: Annotated[Label, Meta(description="Has no effect.")] | None = None
    priority: Priority | None = None
    deadline_s: Seconds | None = None
    deterministic: Deterministic | None = None

    def __post_init__(self) -> None:
        """Raise ``InvalidValue`` for a budget that leaves no room for an answer."""
        budget = self.thinking.budget_tokens if self.thinking else None
        if budget is not None and budget >= self.max_tokens:
            raise InvalidValue(
                f"thinking.budget_tokens is {budget}; below max_tokens, {self.max_tokens}, is "
                "allowed",
                "thinking",
            )
