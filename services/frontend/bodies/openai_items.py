"""The items of an input to OpenAI's Responses API. Each kind is declared by itself; its ``type``
tells which it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from penstock.client.tools import ToolName
from penstock.protocol.declared import Declared
from penstock.protocol.validation import InvalidValue

MAX_ITEMS = 8192
MAX_PARTS = 1024
MAX_ID_LENGTH = 128

Id = Annotated[str, Meta(max_length=MAX_ID_LENGTH)]
Status = Literal["in_progress", "completed", "incomplete"]


def _said(description: str) -> Meta:
    return Meta(description=description)


class InputPart(Declared, kw_only=True):
    """A part of a message."""

    NEUTRAL: ClassVar[Mapping[str, Any]] = {"prompt_cache_breakpoint": ()}

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[list[Any], _said("Has no effect.")] | None = None
    logprobs: Annotated[list[Any], _said("Has no effect.")] | None = None


class ResultPart(Declared, kw_only=True):
    """A part of what a tool has given."""

    NEUTRAL: ClassVar[Mapping[str, Any]] = {"prompt_cache_breakpoint": ()}

    type: Literal["input_text", "output_text", "input_image"]
    text: str | None = None
    image_url: Annotated[str, _said("Has no effect: an image is not seen.")] | None = None
    file_id: Annotated[str, _said("Has no effect: an image is not seen.")] | None = None
    detail: (
        Annotated[Literal["auto", "low", "high", "original"], _said("Has no effect.")] | None
    ) = None
    annotations: Annotated[list[Any], _said("Has no effect.")] | None = None
    logprobs: Annotated[list[Any], _said("Has no effect.")] | None = None

    def __post_init__(self) -> None:
        """Raise ``InvalidValue`` where the type and the rest contradict each other."""
        if (self.text is None) != (self.type == "input_image"):
            wrong = "is missing" if self.text is None else "is not allowed"
            raise InvalidValue(f"text {wrong} with the type {self.type!r}", "input")


Parts = Annotated[list[InputPart], Meta(max_length=MAX_PARTS)]
ResultParts = Annotated[list[ResultPart], Meta(max_length=MAX_PARTS)]


class Item(Declared, kw_only=True):
    """What all items may have."""

    id: Id | None = None
    status: Status | None = None
    internal_chat_message_metadata_passthrough: (
        Annotated[dict[str, Any], _said("Codex's own; has no effect.")] | None
    ) = None


class MessageItem(Item, kw_only=True):
    NEUTRAL: ClassVar[Mapping[str, Any]] = {"phase": ("commentary", "final_answer")}

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts


class FunctionCallItem(Item, kw_only=True):
    NEUTRAL: ClassVar[Mapping[str, Any]] = {
        "caller": ({"type": "direct"},),
        "async": (False,),
    }

    type: Literal["function_call"]
    call_id: Id
    name: ToolName
    arguments: Annotated[str, _said("JSON.")]
    namespace: ToolName | None = None


class FunctionOutputItem(Item, kw_only=True):
    NEUTRAL: ClassVar[Mapping[str, Any]] = {"caller": ({"type": "direct"},)}

    type: Literal["function_call_output"]
    call_id: Id
    output: str | ResultParts
    name: ToolName | None = None
    namespace: ToolName | None = None


class CustomCallItem(Item, kw_only=True):
    NEUTRAL: ClassVar[Mapping[str, Any]] = {
        "caller": ({"type": "direct"},),
        "async": (False,),
    }

    type: Literal["custom_tool_call"]
    call_id: Id
    name: ToolName
    input: str
    namespace: ToolName | None = None


class CustomOutputItem(Item, kw_only=True):
    NEUTRAL: ClassVar[Mapping[str, Any]] = {"caller": ({"type": "direct"},)}

    type: Literal["custom_tool_call_output"]
    call_id: Id
    output: str | ResultParts
    name: ToolName | None = None


class SummaryPart(Declared, kw_only=True):
    type: Literal["summary_text"] = "summary_text"
    text: str


class ReasoningPart(Declared, kw_only=True):
    type: Literal["reasoning_text", "text"] = "reasoning_text"
    text: str


class ReasoningItem(Item, kw_only=True):
    """What the model thought, given back."""

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryPart], Meta(max_length=MAX_PARTS)] | None = None
    content: Annotated[list[ReasoningPart], Meta(max_length=MAX_PARTS)] | None = None
    encrypted_content: (
        Annotated[str, _said("What this server has given for reasoning.encrypted_content.")] | None
    ) = None


class ReferenceItem(Declared, kw_only=True):
    """An item of a stored response."""

    type: Literal["item_reference"] = "item_reference"
    id: Id


InputItem = (
    MessageItem
    | FunctionCallItem
    | FunctionOutputItem
    | CustomCallItem
    | CustomOutputItem
    | ReasoningItem
)
ITEM_KINDS: dict[str, type[Declared]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CustomOutputItem,
    "reasoning": ReasoningItem,
    "item_reference": ReferenceItem,
}
