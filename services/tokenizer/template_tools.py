"""Tools in a chat template: what the template takes, and messages in the form that it wants.

Templates differ in whether they know tools at all, whether a call's arguments are an object or
JSON text, which ids of calls they take, how many calls a message may have, and whether thinking and
words may stand before them. Nothing in a checkpoint says so: the template is tried with calls whose
words are found again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

_KEY, _VALUE, _NAME = "probe_key_7f3", "probe_value_7f3", "probe_name_7f3"
_OTHER_VALUE = "probe_other_7f3"
_SHORT_ID = "c7f3a9b1d"
_LONG_ID = "call_0123456789abcdef01234567"
_SHORT_LENGTH = 9
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "a probe",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}},
    },
}
_PROMPT = """\
You may call the functions that these JSON objects describe:
<tools>
{tools}
</tools>
To call one, answer with its name and its arguments as JSON between these tags, and nothing else:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>"""
"""For templates that know no tools."""
DESCRIBED_FAMILY = "json_tags"
"""The form of the calls in this text."""

Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str]
"""Makes a prompt of messages and tools; raises whatever the template raises."""


class ToolStyle(NamedTuple):
    """How a template takes tools."""

    knows_tools: bool = False
    takes_objects: bool = True
    """Arguments of earlier calls as objects; else as JSON text."""
    takes_short_ids: bool = False
    """Ids of calls with nine letters and digits alone (Mistral)."""
    one_call: bool = False
    """It refuses a message with several calls (Llama 3), or leaves all but the first out
    (gpt-oss)."""
    one_text: bool = False
    """It refuses calls behind both thinking and words (gpt-oss)."""


def find_style(render: Render) -> ToolStyle:
    """Try a template."""
    tools = _tried(render, [{"role": "user", "content": "x"}], [_TOOL])
    if tools is None or _NAME not in tools:
        return ToolStyle()
    for call_id in (_LONG_ID, _SHORT_ID):
        for takes_objects in (True, False):
            text = _tried(render, _conversation([call_id], as_object=takes_objects), [_TOOL])
            if text is not None and _shows_arguments(text):
                style = ToolStyle(True, takes_objects, call_id == _SHORT_ID)
                return _with_limits(render, style, call_id)
    return ToolStyle(True)


def _with_limits(render: Render, style: ToolStyle, call_id: str) -> ToolStyle:
    """The style with what its messages may hold."""
    two = _conversation([call_id, call_id[:-1] + "8"], as_object=style.takes_objects)
    one_call = not _shows_both(render, two) and _shows_both(render, _one_by_one(two))
    texts = _conversation([call_id], as_object=style.takes_objects)
    texts[1] |= {"content": "z", "thinking": "t", "reasoning_content": "t"}
    one_text = _tried(render, texts, [_TOOL]) is None
    return style._replace(one_call=one_call, one_text=one_text)


def _shows_both(render: Render, messages: list[dict[str, Any]]) -> bool:
    text = _tried(render, messages, [_TOOL])
    return text is not None and _OTHER_VALUE in text


def _tried(
    render: Render, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> str | None:
    try:
        return render(messages, tools)
    except Exception:  # a template is foreign code: it may raise anything
        return None


def _conversation(call_ids: list[str], *, as_object: bool) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for call_id, value in zip(call_ids, (_VALUE, _OTHER_VALUE), strict=False):
        arguments: Any = {_KEY: value} if as_object else json.dumps({_KEY: value})
        function = {"name": _NAME, "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": function})
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *(
            {"role": "tool", "content": "y", "tool_call_id": call_id, "name": _NAME}
            for call_id in call_ids
        ),
    ]


def _shows_arguments(text: str) -> bool:
    """The call's argument is there, neither as Python writes it nor as JSON within JSON."""
    python, doubled = f"'{_KEY}': '{_VALUE}'", f'\\"{_KEY}\\"'
    return _VALUE in text and python not in text and doubled not in text


def shaped(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, style: ToolStyle
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools as a template of this style takes them."""
    if not style.knows_tools:
        return _described(messages, tools), None
    if style.one_text:
        messages = list(map(_with_one_text, messages))
    if style.one_call:
        messages = _one_by_one(messages)
    return [_with_calls(message, style) for message in messages], tools


def has_calls(messages: list[dict[str, Any]]) -> bool:
    """Whether tools were called in the conversation."""
    return any("tool_calls" in message or _is_result(message) for message in messages)


def _is_result(message: dict[str, Any]) -> bool:
    return message.get("role") == "tool"


def _with_one_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message with calls whose words have become the end of its thinking."""
    thought, said = message.get("thinking"), message.get("content")
    if not (thought and said and "tool_calls" in message):
        return message
    text = f"{thought}\n\n{said}"
    return {**message, "thinking": text, "reasoning_content": text, "content": ""}


def _one_by_one(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A message for each call, and behind it the call's results. Results of no call of the message
    stay behind the last one."""
    out: list[dict[str, Any]] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            out.append(message)
            continue
        end = place
        while end < len(messages) and _is_result(messages[end]):
            end += 1
        results, place = messages[place:end], end
        first = message
        for call in calls:
            mine = [one for one in results if one.get("tool_call_id") == call["id"]]
            results = [one for one in results if one.get("tool_call_id") != call["id"]]
            out += ({**first, "tool_calls": [call]}, *mine)
            first = {"role": message["role"], "content": ""}
        out += results
    return out


def _with_calls(message: dict[str, Any], style: ToolStyle) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if style.takes_short_ids and "tool_call_id" in message:
        changes["tool_call_id"] = _short(message["tool_call_id"])
    if "tool_calls" in message:
        changes["tool_calls"] = [_call(call, style) for call in message["tool_calls"]]
    return {**message, **changes} if changes else message


def _call(call: dict[str, Any], style: ToolStyle) -> dict[str, Any]:
    function = call["function"]
    if style.takes_objects:
        function = {**function, "arguments": _object(function["arguments"])}
    identity = _short(call["id"]) if style.takes_short_ids else call["id"]
    return {**call, "id": identity, "type": "function", "function": function}


def _object(arguments: str) -> Any:
    """The object that a call's arguments are; what is none stays as it is."""
    if not arguments.strip():
        return {}
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _short(call_id: str) -> str:
    if len(call_id) == _SHORT_LENGTH and call_id.isalnum():
        return call_id
    return hashlib.blake2b(call_id.encode(), digest_size=8).hexdigest()[:_SHORT_LENGTH]


# --- templates that know no tools


def _described(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """The tools as a part of the system message, calls and results as text."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _PROMPT.format(tools=lines)
    if plain[0]["role"] == "system":
        first = {**plain[0], "content": f"{plain[0].get('content') or ''}\n\n{text}".lstrip()}
        return [first, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    if _is_result(message):
        content = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
        return {"role": "user", "content": content}
    if "tool_calls" not in message:
        return message
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    calls = [
        f'<tool_call>\n{{"name": {json.dumps(call["function"]["name"])}, "arguments": '
        f"{call['function']['arguments'] or '{}'}}}\n</tool_call>"
        for call in message["tool_calls"]
    ]
    said = message.get("content")
    return {**rest, "content": "\n".join([*([said] if said else []), *calls])}
