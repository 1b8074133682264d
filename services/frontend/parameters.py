"""Which parameters a request may have, and what they mean.

Sampling parameters come from their one declaration in ``penstock.protocol.sampling``. What other
servers know and this one does not do yet is accepted with the value that asks for nothing, and
refused otherwise: never ignored in silence.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from penstock.protocol.foreign_parameters import FOREIGN_PARAMETERS
from penstock.protocol.grammar.request import BadGrammar, Grammar, conflict, from_response_format
from penstock.protocol.plain_errors import plain_error
from penstock.protocol.sampling import PARAMETERS, SamplingParams, parse_field, token_ids
from penstock.protocol.wire.messages.requests import MAX_CACHE_SALT, RequestPriority
from penstock.services.frontend.errors import ApiError, bad_request, show

MAX_NAMED = 16
"""Parameters that one error names."""
MAX_ADVISED = 4
"""So many of them with what they were probably meant to be: the search takes 0.1 ms for each."""
NOT_YET = "not supported yet: "
MAX_USER_LENGTH = 128
MAX_METADATA = 16
MAX_S = 86_400.0
MAX_METADATA_LENGTH = 512
DEFAULT_COMPLETION_TOKENS = 16
"""``max_tokens`` of /v1/completions where it is left out, as in OpenAI's API."""

_HANDLED = (frozenset(PARAMETERS) - {"echo"}) | {
    *("model", "stream", "stream_options", "max_completion_tokens", "user", "metadata", "store"),
    *("service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key"),
    *("priority", "cache_salt", "deadline_s", "response_format"),
}
_NO_ITEMS: tuple[Any, ...] = ([],)
_NO_TOOLS: tuple[Any, ...] = ("none", "auto")

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "tools": _NO_ITEMS,
    "tool_choice": _NO_TOOLS,
    "functions": _NO_ITEMS,
    "function_call": _NO_TOOLS,
    "modalities": (["text"], []),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "suffix": ("",),
    "best_of": (1,),
    # vLLM
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "logits_processors": _NO_ITEMS,
    "add_special_tokens": (True,),
    "detokenize": (True,),
    "include_reasoning": (True,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "prompt_embeds": (),
    "mm_processor_kwargs": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
}
"""Known, not supported yet; with these values (or null) they ask for nothing."""

CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **_NEUTRAL,
    "add_special_tokens": (False,),
    "echo": (False,),
    "chat_template": (),
    "documents": _NO_ITEMS,
}
COMPLETION_NEUTRAL = {**_NEUTRAL, "top_logprobs": (0,)}


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Equal and of a like type: ``0`` is not ``false``, ``0`` and ``0.0`` are the same."""
    numbers = (int, float)
    for one in neutral:
        if isinstance(value, bool) or isinstance(one, bool):
            alike = type(value) is type(one)
        else:
            alike = type(value) is type(one) or (
                isinstance(value, numbers) and isinstance(one, numbers)
            )
        if alike and value == one:
            return True
    return False


def _names(names: list[str], allowed: Collection[str] = ()) -> str:
    """Names for an error, each with what to do about it where that is known. allowed: the names
    that unknown ones may be meant for."""
    shown = ", ".join(
        show(name).strip("'") + (_advice(name, allowed) if index < MAX_ADVISED else "")
        for index, name in enumerate(names[:MAX_NAMED])
    )
    more = len(names) - MAX_NAMED
    return f"{shown} and {more} more" if more > 0 else shown


def _advice(name: str, allowed: Collection[str]) -> str:
    advice = FOREIGN_PARAMETERS.advice(name, allowed).removeprefix(": ")
    if not allowed:  # it stands in a list that says so itself
        advice = advice.removeprefix(NOT_YET)
    return f" ({advice})" if advice else ""


def check_names(body: dict[str, Any], own: frozenset[str], known: dict[str, Any]) -> None:
    """Raise ``ApiError`` 400 that names every unknown and unsupported parameter at once.

    ``own`` are the endpoint's own fields, ``known`` its table of unsupported ones.
    """
    unknown: list[str] = []
    unsupported: list[str] = []
    allowed = _HANDLED | own
    for name, value in body.items():
        if name in allowed:
            continue
        if name not in known:
            unknown.append(name)
        else:
            if known[name] is _NO_ITEMS and not isinstance(value, list):
                raise invalid(name, "Expected an array", value)
            neutral = (body.get("n", 1),) if name == "best_of" else known[name]
            if not _is_neutral(value, neutral):
                unsupported.append(name)
    if not unknown and not unsupported:
        return
    parts = []
    if unknown:
        parts.append(f"unknown parameter{'s' * (len(unknown) > 1)}: {_names(unknown, allowed)}")
    if unsupported:
        parts.append(f"{NOT_YET}{_names(unsupported)}")
    code = "unknown_parameter" if unknown else "unsupported_parameter"
    param = (unknown or unsupported)[0][:MAX_USER_LENGTH]
    raise bad_request("; ".join(parts), param=param, code=code)


def invalid(name: str, expected: str, value: Any) -> ApiError:
    """A 400 that names the parameter, what it may be, and the value."""
    return bad_request(f"{name}: {expected} (the value is {show(value)})", param=name)


def take_bool(body: dict[str, Any], name: str, where: str = "") -> bool:
    """A boolean field; false where it is absent."""
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise invalid(where + name, "Expected true or false", value)
    return value


def _accept_silent(body: dict[str, Any]) -> None:
    """Fields that change nothing here but must have their right shape."""
    take_bool(body, "parallel_tool_calls")
    if body.get("store", False) is not False:
        raise invalid("store", "Nothing is stored here; only false is supported", body["store"])
    for name in ("service_tier", "safety_identifier", "prompt_cache_key"):
        value = body.get(name, "")
        if not isinstance(value, str) or len(value) > MAX_USER_LENGTH:
            raise invalid(name, f"Expected a string of at most {MAX_USER_LENGTH}", value)
    metadata = body.get("metadata", {})
    if not isinstance(metadata, dict) or len(metadata) > MAX_METADATA:
        raise invalid("metadata", f"Expected an object of at most {MAX_METADATA} pairs", metadata)
    for value in metadata.values():
        if not isinstance(value, str) or len(value) > MAX_METADATA_LENGTH:
            limit = f"Expected strings of at most {MAX_METADATA_LENGTH}"
            raise invalid("metadata", limit, value)


def take_user(body: dict[str, Any]) -> str:
    """``user``: at most 128 printable characters."""
    return _take_printable(body, "user", MAX_USER_LENGTH)


def take_cache_salt(body: dict[str, Any]) -> str:
    """``cache_salt`` as vLLM has it: at most 128 printable characters; absent or empty: none."""
    return _take_printable(body, "cache_salt", MAX_CACHE_SALT)


def _take_printable(body: dict[str, Any], name: str, max_length: int) -> str:
    value = body.get(name, "")
    if not isinstance(value, str) or len(value) > max_length or not value.isprintable():
        limit = f"Expected a string of at most {max_length} printable characters"
        raise invalid(name, limit, value)
    return value


def take_priority(body: dict[str, Any]) -> int:
    """``priority`` as vLLM has it: a 32-bit integer, lower first; 0 where it is absent."""
    value = body.get("priority", 0)
    try:
        return msgspec.convert(value, RequestPriority)
    except (msgspec.ValidationError, OverflowError) as error:
        raise invalid("priority", plain_error(error)[:200], value) from None


def take_deadline(body: dict[str, Any]) -> float | None:
    """``deadline_s``: seconds from its arrival in which the whole answer must be there."""
    value = body.get("deadline_s")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_S:
        raise invalid("deadline_s", f"Expected seconds, above 0 and at most {MAX_S:.0f}", value)
    return float(value)


def take_sampling(
    body: dict[str, Any], vocab_size: int, default_max_tokens: int | None, *, chat: bool
) -> SamplingParams:
    """The sampling parameters. Raises ``ApiError`` 400 that names value and limit."""
    _accept_silent(body)
    body = _with_logprobs(body, chat=chat)
    fields: dict[str, Any] = {"max_tokens": default_max_tokens}
    for name in PARAMETERS:
        if name in body:
            fields[name] = _parse(name, name, body[name])
    if "max_completion_tokens" in body:
        name = "max_completion_tokens"
        limit = _parse(name, "max_tokens", body[name])
        if "max_tokens" in body and limit != body["max_tokens"]:
            raise bad_request(
                f"max_tokens and max_completion_tokens contradict each other ({body['max_tokens']} "
                f"and {limit}); send one of them, or the same value in both",
                param=name,
            )
        fields["max_tokens"] = limit
    fields["structured_outputs"] = _take_grammar(body, fields.get("structured_outputs"))
    params = SamplingParams(**fields)
    for name, token in token_ids(params):
        if token >= vocab_size:
            limit = f"Token ids must be below the vocabulary's size {vocab_size}"
            raise invalid(name, limit, token)
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > vocab_size:
            limit = f"At most {vocab_size}, the size of the vocabulary"
            raise invalid(name, limit, getattr(params, name))
    _check_grammar(params)
    most = params.max_tokens
    if most is not None and params.min_tokens > most:
        raise invalid("min_tokens", f"At most max_tokens, which is {most}", params.min_tokens)
    return params


def _take_grammar(body: dict[str, Any], structured: Grammar | None) -> Grammar | None:
    """``response_format``, or what ``structured_outputs`` asks for."""
    if "response_format" not in body:
        return structured
    try:
        format = from_response_format(body["response_format"])
    except BadGrammar as error:
        raise bad_request(error.message, param=error.param) from None
    if format is not None and structured is not None:
        raise bad_request(
            "response_format and structured_outputs contradict each other; send one of them",
            param="structured_outputs",
        )
    return format or structured


def _check_grammar(params: SamplingParams) -> None:
    grammar = params.structured_outputs
    if grammar is None:
        return
    allowed = params.allowed_token_ids is not None
    reason = conflict(grammar, allowed_token_ids=allowed, bad_words=bool(params.bad_words))
    if reason is not None:
        raise bad_request(reason, param=grammar.param)


def _parse(name: str, field: str, value: Any) -> Any:
    try:
        return parse_field(field, value)
    except BadGrammar as error:
        raise bad_request(error.message, param=error.param) from None
    except (msgspec.ValidationError, OverflowError) as error:
        raise invalid(name, plain_error(error)[:200], value) from None


def _with_logprobs(body: dict[str, Any], *, chat: bool) -> dict[str, Any]:
    """The chat endpoint's ``logprobs`` and ``top_logprobs`` become one number, as elsewhere."""
    fields = dict(body)
    if fields.get("prompt_logprobs") is False:
        del fields["prompt_logprobs"]
    if not chat:
        if fields.get("logprobs") is False:
            del fields["logprobs"]
        return fields
    wanted = take_bool(fields, "logprobs")
    fields.pop("logprobs", None)
    most = fields.pop("top_logprobs", 0)
    number = _parse("top_logprobs", "logprobs", most)
    if wanted:
        fields["logprobs"] = number
    elif number:
        raise invalid("top_logprobs", "Only together with logprobs: true", most)
    return fields


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False
    continuous_usage: bool = False


def take_stream(body: dict[str, Any]) -> tuple[bool, StreamOptions]:
    """``stream`` and ``stream_options``. Raises ``ApiError`` 400."""
    stream = take_bool(body, "stream")
    options = body.get("stream_options", {})
    if not isinstance(options, dict):
        raise invalid("stream_options", "Expected an object", options)
    if options and not stream:
        raise invalid("stream_options", "Only allowed together with stream: true", options)
    given = {name: value for name, value in options.items() if value is not None}
    known = {"include_usage", "continuous_usage_stats", "include_obfuscation"}
    if unknown := sorted(given.keys() - known):
        message = f"unknown parameters in stream_options: {_names(unknown, known)}"
        raise bad_request(message, param="stream_options", code="unknown_parameter")
    if take_bool(given, "include_obfuscation", "stream_options."):
        raise bad_request(
            "not supported yet: stream_options.include_obfuscation", param="stream_options"
        )
    return stream, StreamOptions(
        include_usage=take_bool(given, "include_usage", "stream_options."),
        continuous_usage=take_bool(given, "continuous_usage_stats", "stream_options."),
    )
