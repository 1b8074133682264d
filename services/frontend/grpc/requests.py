"""What a message asks for: it becomes the body that HTTP would have had, and is checked as one.

So the two have the same limits and defaults, and an error names the field and says what is allowed.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, MutableSequence, Sized
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from penstock.client.gateway_interface import ServedModel
from penstock.client.messages import MAX_MESSAGES
from penstock.client.request_terms import MAX_DEADLINE_S
from penstock.client.tools import MAX_TOOLS
from penstock.protocol.declared import Declared
from penstock.protocol.grpc import penstock_pb2 as pb
from penstock.protocol.validation import InvalidValue, read
from penstock.protocol.wire.messages.requests import Tokens
from penstock.protocol.wire.messages.tokens import MAX_CALLS
from penstock.services.frontend.bodies.requests import (
    ChatBody,
    CompletionBody,
)
from penstock.services.frontend.bodies.tokens import TokenizeBody
from penstock.services.frontend.body import decode_object
from penstock.services.frontend.chat_request import chat_request
from penstock.services.frontend.completion_request import completion_request
from penstock.services.frontend.dialects.tokens import TokensRequest, tokenize_request
from penstock.services.frontend.errors import bad_request, from_invalid
from penstock.services.frontend.parse import GenerateRequest, find_model
from penstock.services.frontend.token_arrays import check_vocabulary

Sent = TypeVar("Sent", bound=Message)
Body = TypeVar("Body", bound=Declared)
Fields = dict[str, Any]


def decoded(kind: type[Sent], raw: bytes) -> Sent:
    """The message in these bytes. Raises ``ApiError`` 400."""
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        where = kind.DESCRIPTOR.full_name
        raise bad_request(f"The message is no {where}: {str(error)[:200]}") from None


def given(message: Message) -> Fields:
    """The fields that are set, by name: lists and dictionaries of plain values, and messages."""
    return {field.name: _plain(value) for field, value in message.ListFields()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, MutableSequence) else value


def checked(fields: Fields, body: type[Body]) -> Body:
    """The body with these fields. Raises ``ApiError`` 400."""
    try:
        found: Body = read(fields, body)
        return found
    except InvalidValue as invalid:
        raise from_invalid(invalid) from None


def limit(items: Sized, where: str, most: int) -> None:
    """Raise ``ApiError`` 400 for more than may be looked at: each of them is dear to read."""
    if len(items) > most:
        raise bad_request(
            f"{where} has {len(items)} items; at most {most} are allowed",
            param=where.partition("[")[0],
        )


def deadline(asked: float | None, left: float | None) -> float | None:
    """The seconds that a request has: as its message says, and as its call does."""
    if left is None:
        return asked
    left = min(max(left, 0.001), MAX_DEADLINE_S)
    return left if asked is None or asked > left else asked


# --- Generate and Chat


def generate_request(
    message: pb.GenerateRequest, models: list[ServedModel], left: float | None
) -> GenerateRequest:
    """left: seconds until the call's deadline. Raises ``ApiError``."""
    fields = {**_common(message, left), "prompt": message.text or "-"}
    which = message.WhichOneof("prompt")
    if which is None:
        raise bad_request("there is neither text nor token_ids; one of them is required", "prompt")
    body = checked(fields, CompletionBody)
    if which == "token_ids":
        model, _ = find_model(body.model, models)
        ids = message.token_ids.ids
        keep: int | None = getattr(body, "truncate_prompt_tokens", None)
        if keep is not None:
            body.prompt = list(ids[-keep:])
        elif len(ids) > model.max_model_len:
            raise too_long(len(ids), model)
        else:
            body.prompt = list(ids)
    else:
        body.prompt = message.text
    return completion_request(body, models)


def too_long(tokens: int, model: ServedModel) -> Exception:
    """The refusal of a prompt before any of its ids is looked at."""
    return bad_request(
        f"the prompt is too long: it has {tokens} tokens; the maximum context length is "
        f"{model.max_model_len} tokens for prompt and answer together (--max-model-len)",
        param="prompt",
        code="context_length_exceeded",
    )


def tokens_of(ids: MutableSequence[int], where: str, model: ServedModel) -> Tokens:
    """Token ids as a prompt. Raises ``ApiError`` 400."""
    if not ids:
        raise bad_request(f"{where} is empty", param=where, code="empty_prompt")
    if len(ids) > model.max_model_len:
        raise too_long(len(ids), model)
    listed = list(ids)
    check_vocabulary(listed, where, model.vocab_size)
    packed = array("i", listed)
    if sys.byteorder == "big":
        packed.byteswap()
    return Tokens(packed.tobytes())


_OF_CHAT = (
    "parallel_tool_calls",
    "reasoning_effort",
    "include_reasoning",
    "thinking_token_budget",
    "add_generation_prompt",
    "continue_final_message",
)


def chat(message: pb.ChatRequest, models: list[ServedModel], left: float | None) -> GenerateRequest:
    """left: as for ``generate_request``. Raises ``ApiError``."""
    fields = _common(message, left)
    if (listed := fields.pop("logprobs", None)) is not None:
        fields |= {"logprobs": True, "top_logprobs": listed}
    fields |= {name: getattr(message, name) for name in _OF_CHAT if message.HasField(name)}
    fields |= _conversation(message)
    if choice := _tool_choice(message):
        fields["tool_choice"] = choice
    return chat_request(checked(fields, ChatBody), models)


def _common(message: pb.GenerateRequest | pb.ChatRequest, left: float | None) -> Fields:
    """The fields of a body that both have. Their answers are streams unless they ask otherwise."""
    fields = {"stream": True, **given(message.options), **given(message.sampling)}
    if message.HasField("model"):
        fields["model"] = message.model
    seconds = deadline(fields.get("deadline_s"), left)
    if seconds is not None:
        fields["deadline_s"] = seconds
    if (asked := fields.pop("structured_outputs", None)) is not None:
        fields["structured_outputs"] = _structured(asked)
    return fields


def _structured(asked: pb.StructuredOutputs) -> Fields:
    match asked.WhichOneof("constraint"):
        case "json":
            return {"json": _json(asked.json, "structured_outputs.json")}
        case "choice":
            return {"choice": list(asked.choice.choices)}
        case None:
            return {}
        case name:
            return {name: getattr(asked, name)}


def _json(text: str, where: str) -> Fields:
    """A JSON object in a field. Raises ``ApiError`` 400."""
    try:
        return decode_object(text.encode())
    except Exception as error:
        message = getattr(error, "message", str(error)).replace("The request body", where, 1)
        raise bad_request(message, param=where.partition(".")[0].partition("[")[0]) from None


def _conversation(message: pb.ChatRequest | pb.TokenizeRequest) -> Fields:
    """Messages, tools and the template's variables. Raises ``ApiError`` 400."""
    limit(message.messages, "messages", MAX_MESSAGES)
    limit(message.tools, "tools", MAX_TOOLS)
    for number, one in enumerate(message.messages):
        limit(one.tool_calls, f"messages[{number}].tool_calls", MAX_CALLS)
    fields: Fields = {"messages": [_message(one) for one in message.messages]}
    if message.tools:
        fields["tools"] = [_tool(one, f"tools[{n}]") for n, one in enumerate(message.tools)]
    if message.HasField("enable_thinking"):
        fields["chat_template_kwargs"] = {"enable_thinking": message.enable_thinking}
    return fields


def _message(message: pb.Message) -> Fields:
    fields = given(message)
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return fields


def _tool(tool: pb.Tool, where: str) -> Fields:
    function = given(tool)
    if tool.HasField("parameters"):
        function["parameters"] = _json(tool.parameters, f"{where}.parameters")
    return {"type": "function", "function": function}


def _tool_choice(message: pb.ChatRequest) -> str | Fields:
    mode = message.tool_choice if message.HasField("tool_choice") else ""
    if not message.allowed_tools:
        return mode
    limit(message.allowed_tools, "allowed_tools", MAX_TOOLS)
    named = [{"type": "function", "function": {"name": name}} for name in message.allowed_tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode or "auto", "tools": named}}


# --- Tokenize


def tokenize(message: pb.TokenizeRequest, models: list[ServedModel]) -> TokensRequest:
    """Raises ``ApiError``."""
    names = ("model", "add_special_tokens", "add_generation_prompt", "continue_final_message")
    fields = {name: getattr(message, name) for name in names if message.HasField(name)}
    if message.HasField("text"):
        fields["prompt"] = message.text
    if message.messages:
        fields |= _conversation(message)
    elif message.tools or message.HasField("enable_thinking"):
        raise bad_request("tools and enable_thinking are allowed only together with messages")
    return tokenize_request(checked(fields, TokenizeBody), models)
