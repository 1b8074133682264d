"""What the model is asked to continue: prompts of completions, messages of chats."""

from __future__ import annotations

import sys
from array import array
from typing import Any

import msgspec

from penstock.client.interface import ServedModel
from penstock.protocol.plain_errors import plain_error
from penstock.protocol.suggestions import closest
from penstock.protocol.wire.messages.requests import Chat, Prompt, Text, Tokens
from penstock.services.frontend.errors import ApiError, bad_request, show
from penstock.services.frontend.parameters import invalid, take_bool
from penstock.services.frontend.token_arrays import IdArray, check_vocabulary

MAX_PROMPTS = 128
MAX_MESSAGES = 8192
MAX_PARTS = 1024
MAX_NAME_LENGTH = 128
MAX_TEMPLATE_VALUE_LENGTH = 64


ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE_NAMES = frozenset({"role", "content", "name", "tool_call_id"})
_REASONING = frozenset({"reasoning_content", "reasoning"})
_MESSAGE_UNSUPPORTED: dict[str, Any] = {
    "tool_calls": [],
    "function_call": None,
    "audio": None,
    "refusal": "",
    "annotations": [],
    "prefix": False,
}
"""Known, not supported yet; with this value (or null) they ask for nothing."""
TEMPLATE_KWARGS: dict[str, type] = {
    "enable_thinking": bool,
    "thinking": bool,
    "reasoning_effort": str,
}
"""Template variables that a client may set; the rest are ours (CVE-2025-62426)."""
GENERATION_PROMPT_FIELDS = ("add_generation_prompt", "continue_final_message")
"""How a chat's prompt ends, as in vLLM; they travel among the template's variables."""


def parse_prompts(value: Any, model: ServedModel, keep: int | None = None) -> list[Prompt]:
    """``prompt`` of /v1/completions: text, token ids, or a list of either. keep: so many last ids
    of each (a tokenizer cuts what is text).

    Raises ``ApiError`` 400.
    """
    if isinstance(value, str):
        return [_text(value, "prompt")]
    if isinstance(value, IdArray):
        return [_long_tokens(value, "prompt", model, keep)]
    if not isinstance(value, list):
        raise invalid("prompt", "Expected a string, token ids, or an array of either", value)
    if not value:
        raise bad_request("prompt: The prompt is empty", param="prompt", code="empty_prompt")
    if not isinstance(value[0], str | list | IdArray):
        return [_tokens(value, "prompt", model, keep)]
    if len(value) > MAX_PROMPTS:
        raise invalid("prompt", f"At most {MAX_PROMPTS} prompts in one request", value)
    prompts: list[Prompt] = []
    for index, one in enumerate(value):
        where = f"prompt[{index}]"
        if isinstance(one, str):
            prompts.append(_text(one, where))
        elif isinstance(one, list):
            prompts.append(_tokens(one, where, model, keep))
        elif isinstance(one, IdArray):
            prompts.append(_long_tokens(one, where, model, keep))
        else:
            raise invalid(where, "Expected a string or token ids", one)
    return prompts


def _text(text: str, where: str) -> Text:
    if not text:
        raise bad_request(f"{where}: The prompt is empty", param="prompt", code="empty_prompt")
    return Text(text)


def _tokens(ids: list[Any], where: str, model: ServedModel, keep: int | None) -> Tokens:
    if not ids:
        raise bad_request(f"{where}: The prompt is empty", param="prompt", code="empty_prompt")
    try:
        checked = msgspec.convert(ids, list[int])
    except (msgspec.ValidationError, OverflowError) as error:
        raise bad_request(f"{where}: {plain_error(error)[:200]}", param="prompt") from None
    check_vocabulary(checked, where, model.vocab_size)
    if keep is not None:
        checked = checked[-keep:]
    if len(checked) > model.max_model_len:
        raise _too_long(where, str(len(checked)), model)
    return _packed(array("i", checked))


def _long_tokens(ids: IdArray, where: str, model: ServedModel, keep: int | None) -> Tokens:
    """As ``_tokens``, with the length first where all ids count."""
    if keep is None and ids.is_longer_than(model.max_model_len):
        raise _too_long(where, f"more than {model.max_model_len}", model)
    checked = ids.decode(where, model.vocab_size)
    if keep is not None and len(checked := checked[-keep:]) > model.max_model_len:
        raise _too_long(where, str(len(checked)), model)
    return _packed(checked)


def _too_long(where: str, tokens: str, model: ServedModel) -> ApiError:
    return bad_request(
        f"{where}: The prompt has {tokens} tokens; prompt and output together may have "
        f"{model.max_model_len} (--max-model-len)",
        param="prompt",
        code="context_length_exceeded",
    )


def _packed(packed: array[int]) -> Tokens:
    if sys.byteorder == "big":
        packed.byteswap()
    return Tokens(packed.tobytes())


def parse_chat(body: dict[str, Any]) -> Chat:
    """``messages`` and ``chat_template_kwargs``, normalized. Raises ``ApiError`` 400.

    Content parts become one string with a line break between parts, and ``developer`` becomes
    ``system``: chat templates of most models know neither.
    """
    messages = body.get("messages")
    if messages is None:
        raise bad_request("messages: Required, and missing", param="messages")
    if not isinstance(messages, list):
        raise invalid("messages", "Expected an array of messages", messages)
    if not messages:
        raise bad_request("messages: The array is empty; give at least one", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise invalid("messages", f"At most {MAX_MESSAGES} messages", messages)
    normalized = [_message(one, f"messages[{index}]") for index, one in enumerate(messages)]
    kwargs = {**_template_kwargs(body.get("chat_template_kwargs", {})), **_prompt_end(body)}
    return Chat(msgspec.json.encode(normalized), msgspec.json.encode(kwargs))


def _prompt_end(body: dict[str, Any]) -> dict[str, Any]:
    """``add_generation_prompt`` and ``continue_final_message`` where they differ from the default:
    the prompt ends with the opening of a new assistant message."""
    adds, continues = (take_bool(body, name) for name in GENERATION_PROMPT_FIELDS)
    if adds and continues:
        raise bad_request(
            "continue_final_message and add_generation_prompt contradict each other: the answer "
            "either continues the last message or begins a new one; send one of them as false",
            param="continue_final_message",
        )
    if continues:
        return {"add_generation_prompt": False, "continue_final_message": True}
    return {} if adds or "add_generation_prompt" not in body else {"add_generation_prompt": False}


def _message_error(where: str, expected: str, value: Any) -> ApiError:
    message = f"{where}: {expected} (the value is {show(value)})"
    return bad_request(message, param="messages")


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise _message_error(where, "Expected an object with role and content", message)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _message_error(f"{where}.role", f"Expected one of {', '.join(ROLES)}", role)
    found = {"role": "system" if role == "developer" else role}
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""  # as vLLM reads it
    found["content"] = _content(content, f"{where}.content")
    if role == "tool" and not message.get("tool_call_id"):
        raise bad_request(
            f"{where}.tool_call_id: Required in a message of the role tool, and missing",
            param="messages",
        )
    for name, value in message.items():
        if name in ("role", "content") or value is None:
            continue
        if name in _MESSAGE_NAMES:
            if not isinstance(value, str) or len(value) > MAX_NAME_LENGTH:
                limit = f"Expected a string of at most {MAX_NAME_LENGTH}"
                raise _message_error(f"{where}.{name}", limit, value)
            found[name] = value
        elif name in _REASONING:
            if not isinstance(value, str):
                raise _message_error(f"{where}.{name}", "Expected a string", value)
            found["reasoning_content"] = value
        elif name not in _MESSAGE_UNSUPPORTED:
            likely = closest(name, {"role", "content", *_MESSAGE_NAMES})
            meant = f"; did you mean {likely}?" if likely else ""
            raise bad_request(f"{where}: unknown field {show(name)}{meant}", param="messages")
        elif type(value) is not type(neutral := _MESSAGE_UNSUPPORTED[name]) or value != neutral:
            raise bad_request(f"{where}.{name}: not supported yet", param="messages")
    return found


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _message_error(where, "Expected a string or an array of parts", content)
    if not content:
        raise _message_error(where, "Expected at least one part", content)
    if len(content) > MAX_PARTS:
        raise _message_error(where, f"At most {MAX_PARTS} parts", content)
    texts = []
    for index, part in enumerate(content):
        here = f"{where}[{index}]"
        if not isinstance(part, dict):
            raise _message_error(here, "Expected an object with type and text", part)
        kind = part.get("type")
        if kind != "text":
            raise _message_error(f"{here}.type", "Only text parts are supported", kind)
        text = part.get("text")
        if not isinstance(text, str):
            raise _message_error(f"{here}.text", "Expected a string", text)
        if unknown := part.keys() - {"type", "text"}:
            raise bad_request(f"{here}: unknown field {show(min(unknown))}", param="messages")
        texts.append(text)
    return "\n".join(texts)


def _template_kwargs(value: Any) -> dict[str, Any]:
    name = "chat_template_kwargs"
    if not isinstance(value, dict):
        raise invalid(name, "Expected an object", value)
    for key, one in value.items():
        kind = TEMPLATE_KWARGS.get(key)
        if kind is None:
            allowed = ", ".join(TEMPLATE_KWARGS)
            message = f"{name}: {show(key)} may not be set; allowed are {allowed}"
            raise bad_request(message, param=name)
        if not isinstance(one, kind) or (
            isinstance(one, str) and len(one) > MAX_TEMPLATE_VALUE_LENGTH
        ):
            raise invalid(f"{name}.{key}", f"Expected a short {kind.__name__}", one)
    return value
