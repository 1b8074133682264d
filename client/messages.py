"""The messages of a chat, as a client of the API or of the library writes them.

They travel as JSON to a tokenizer, whose chat template renders them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from penstock.client.cache_control import CacheControl
from penstock.protocol.declared import Declared
from penstock.protocol.shown_values import show
from penstock.protocol.validation import InvalidValue, check_text, read
from penstock.protocol.wire.messages.tokens import MAX_CALLS

MAX_MESSAGES = 8192
MAX_PARTS = 1024
MAX_NAME_LENGTH = 128
MAX_TEMPLATE_VALUE_LENGTH = 64
PART_SEPARATOR = "\n"
"""What stands between the parts of a message's content."""

Name = Annotated[str, Meta(max_length=MAX_NAME_LENGTH)]


class TextPart(Declared, kw_only=True):
    """A part of a message's content."""

    NEUTRAL: ClassVar[Mapping[str, Any]] = {
        **dict.fromkeys(("image_url", "input_audio", "video_url", "file", "refusal"), ()),
    }

    type: Literal["text"]
    text: Annotated[str, Meta(description="Parts are joined by line breaks.")]
    cache_control: CacheControl | None = None


Parts = Annotated[list[TextPart], Meta(min_length=1, max_length=MAX_PARTS)]


class CalledFunction(Declared, kw_only=True):
    name: Name
    arguments: Annotated[str, Meta(description="JSON.")]


class ToolCall(Declared, kw_only=True):
    """A call that an assistant's message has made."""

    NEUTRAL: ClassVar[Mapping[str, Any]] = {"index": tuple(range(MAX_CALLS))}

    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Declared, kw_only=True):
    """A message of a chat."""

    NEUTRAL: ClassVar[Mapping[str, Any]] = {
        "function_call": (),
        "audio": (),
        "refusal": ("",),
        "annotations": ([],),
        "prefix": (False,),
    }

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"],
        Meta(description="Who speaks; developer is the same as system."),
    ]
    content: (
        Annotated[
            str | Parts,
            Meta(description="The text; only an assistant's message may have none."),
        ]
        | None
    ) = None
    name: Annotated[Name, Meta(description="The speaker's name.")] | None = None
    tool_call_id: (
        Annotated[Name, Meta(description="Which call a message of the role tool answers.")] | None
    ) = None
    reasoning_content: (
        Annotated[str, Meta(description="What an assistant thought before the content.")] | None
    ) = None
    reasoning: Annotated[str, Meta(description="The same as reasoning_content.")] | None = None
    tool_calls: (
        Annotated[
            list[ToolCall],
            Meta(max_length=MAX_CALLS, description="Calls that an assistant's message has made."),
        ]
        | None
    ) = None
    cache_control: CacheControl | None = None


Messages = Annotated[
    list[Message],
    Meta(min_length=1, max_length=MAX_MESSAGES, description="The conversation, oldest first."),
]


class TemplateVariables(Declared, kw_only=True):
    """Variables of the chat template that a client may set; the rest are the server's."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: Annotated[str, Meta(max_length=MAX_TEMPLATE_VALUE_LENGTH)] | None = None


def read_messages(value: Any, where: str = "messages") -> list[Message]:
    """Messages as a client wrote them. Raises ``InvalidValue``, which is a ``ValueError``."""
    messages: list[Message] = read(value, Messages, where)
    return messages


def encode_messages(messages: list[Message], where: str = "messages") -> bytes:
    """The JSON that a chat template is rendered with; changes ``messages``.

    Content parts become one string with a line break between parts, and ``developer`` becomes
    ``system``: chat templates of most models know neither. The result of a call gets its name,
    which some templates print. Raises ``InvalidValue``.
    """
    called: dict[str, str] = {}
    for index, message in enumerate(messages):
        if message.tool_calls:
            _check_calls(message, f"{where}[{index}]")
            called.update((call.id, call.function.name) for call in message.tool_calls)
        else:
            message.tool_calls = None
        if message.role == "tool" and message.name is None:
            message.name = called.get(message.tool_call_id or "")
        if type(message.content) is not str or message.role in ("developer", "tool"):
            _normalize(message, f"{where}[{index}]")
        message.cache_control = None  # the template has no use for it
        if message.reasoning is not None:
            message.reasoning_content = message.reasoning
            message.reasoning = None
    try:
        return msgspec.json.encode(messages)
    except UnicodeEncodeError:
        check_text([msgspec.structs.asdict(message) for message in messages], where)
        raise


def _check_calls(message: Message, where: str) -> None:
    if message.role != "assistant":
        raise InvalidValue(
            f"{where}.tool_calls are allowed only in a message of the role assistant, not of "
            f"{message.role}",
            where.partition("[")[0],
        )


def _normalize(message: Message, where: str) -> None:
    if message.role == "tool" and not message.tool_call_id:
        raise InvalidValue(
            f"{where}.tool_call_id is missing; a message of the role tool must have it",
            where.partition("[")[0],
        )
    if isinstance(message.content, list):
        message.content = PART_SEPARATOR.join(part.text for part in message.content)
    elif message.content is None:
        if message.role != "assistant":
            raise InvalidValue(
                f"{where}.content is {show(None)}; a string or an array of parts is required in a "
                f"message of the role {message.role}",
                where.partition("[")[0],
            )
        message.content = ""  # as vLLM reads it
    if message.role == "developer":
        message.role = "system"
