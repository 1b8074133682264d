"""The items of an input: read, named, and written down for those who continue."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.protocol.shown_values import show
from penstock.protocol.validation import InvalidValue, read
from penstock.services.frontend.bodies.openai_items import (
    ITEM_KINDS,
    InputItem,
    InputPart,
    MessageItem,
    ReasoningItem,
    ReferenceItem,
    ResultPart,
)
from penstock.services.frontend.dialects.unseen import IMAGE

PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "cto",
    "reasoning": "rs",
}
_RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32}")
_OUTPUT_ID = re.compile(r"(?:msg|fc|ctc|rs)_([0-9a-f]{32})_([0-9]{1,4})")
_SEALED = "penstock1."
"""What begins the ``encrypted_content`` of a reasoning item. It is only written down in base64:
who holds it may read it, as he may read the item's content."""


class OutputPlace(NamedTuple):
    """Where an item of an output is."""

    response_id: str
    number: int


def response_id(answer_id: str) -> str:
    """``answer_id``: 32 hex digits."""
    return f"resp_{answer_id}"


def is_response_id(name: str) -> bool:
    """Whether a response of this server may have that name. Nothing else is ever looked for."""
    return _RESPONSE_ID.fullmatch(name) is not None


def output_id(kind: str, answer_id: str, index: int) -> str:
    """The name of an item in the output of an answer; it tells where the item is."""
    return f"{PREFIXES[kind]}_{answer_id}_{index}"


def place_of(item_id: str) -> OutputPlace | None:
    """The opposite of ``output_id``."""
    found = _OUTPUT_ID.fullmatch(item_id)
    return None if found is None else OutputPlace(response_id(found[1]), int(found[2]))


def seal(thought: str) -> str:
    """What a client keeps of thinking, to give it back."""
    return _SEALED + base64.b64encode(thought.encode()).decode()


def unseal(sealed: str, where: str) -> str:
    """Raises ``InvalidValue`` for what ``seal`` has not made."""
    try:
        if sealed.startswith(_SEALED):
            return base64.b64decode(sealed[len(_SEALED) :], validate=True).decode()
    except (binascii.Error, ValueError):
        pass
    raise InvalidValue(
        f"{where}.encrypted_content was not made by this server, which cannot read it; leave it "
        "out, or leave the whole item out",
        "input",
    )


def read_items(value: str | Sequence[Any], where: str = "input") -> list[InputItem | ReferenceItem]:
    """An input as a client wrote it. Raises ``InvalidValue``."""
    if isinstance(value, str):
        return [MessageItem(role="user", content=value)]
    return [read_item(one, f"{where}[{index}]") for index, one in enumerate(value)]


def read_item(value: Any, where: str) -> InputItem | ReferenceItem:
    """One item; without a type it is a message, or a reference if it has only an id."""
    if not isinstance(value, dict):
        raise InvalidValue(f"{where} is {show(value)}; an object is allowed", "input")
    kind = value.get("type")
    if kind is None:
        kind = "item_reference" if value.keys() <= {"id", "type"} else "message"
    declared = ITEM_KINDS.get(kind) if isinstance(kind, str) else None
    if declared is None:
        raise InvalidValue(
            f"{where}.type is {show(kind)}; {', '.join(map(show, ITEM_KINDS))} are allowed", "input"
        )
    found: InputItem | ReferenceItem = read(value, declared, where)
    if isinstance(found, ReasoningItem) and found.encrypted_content and not found.content:
        unseal(found.encrypted_content, where)
    return found


def thought_of(item: ReasoningItem, where: str = "input") -> str:
    """The text of a reasoning item that was given back."""
    if item.content:
        return "".join(part.text for part in item.content)
    if item.encrypted_content:
        return unseal(item.encrypted_content, where)
    return "\n\n".join(part.text for part in item.summary or ())


def text_of(content: str | Sequence[InputPart | ResultPart]) -> str:
    """Parts of an input are joined by line breaks, as in a chat; those of an answer are not."""
    if isinstance(content, str):
        return content
    between = "" if all(part.type == "output_text" for part in content) else "\n"
    return between.join(IMAGE if part.text is None else part.text for part in content)


def written(item: InputItem, answer_id: str, index: int) -> dict[str, Any]:
    """An input's item as it is kept and listed."""
    kind = item.type
    found = msgspec.to_builtins(item)
    found["type"] = kind
    found.pop("internal_chat_message_metadata_passthrough", None)
    found.setdefault("status", "completed")
    found["id"] = item.id or f"{PREFIXES[kind]}_{answer_id}_in{index}"
    if isinstance(item, MessageItem):
        part = "output_text" if item.role == "assistant" else "input_text"
        content = item.content
        parts = [content] if isinstance(content, str) else [one.text for one in content]
        found["content"] = [_part(part, text) for text in parts]
    if isinstance(item, ReasoningItem):
        found.setdefault("summary", [])
    return dict(found)


def _part(kind: str, text: str) -> dict[str, Any]:
    found: dict[str, Any] = {"type": kind, "text": text}
    if kind == "output_text":
        found["annotations"] = []
    return found
