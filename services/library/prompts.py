"""What the library takes as prompts, and what it says of anything else."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any, TypedDict, cast

import msgspec

from penstock.client.cache_breakpoints import hints_of_chat
from penstock.client.cache_control import FIELD
from penstock.client.messages import TemplateVariables, encode_messages, read_messages
from penstock.client.tools import (
    ToolChoice,
    ToolChoiceField,
    ToolDeclaration,
    ToolDeclarations,
    chosen,
    output_format,
)
from penstock.protocol.validation import check_text, read
from penstock.protocol.wire.messages.cache_hints import CacheHints
from penstock.protocol.wire.messages.requests import (
    Chat,
    OutputFormat,
    Prompt,
    PromptText,
    Tokens,
    ToolMode,
)


class TextPrompt(TypedDict):
    """Text, as vLLM's users write it."""

    prompt: str


class TokensPrompt(TypedDict):
    """Token ids, as vLLM's users write them."""

    prompt_token_ids: Sequence[int]


PlainPrompt = str | Sequence[int]
PromptLike = PlainPrompt | TextPrompt | TokensPrompt
Message = dict[str, Any]
_NO_PROMPTS = (bytes, bytearray, memoryview, dict, set, frozenset)
"""Iterable, but no row of token ids: it would be read as something else."""


def list_of_prompts(prompts: PromptLike | Sequence[PromptLike]) -> list[PlainPrompt]:
    """The prompts of one call. One alone is text, a sequence of integers, or a dict with either.

    Raises ``ValueError`` for an item that is neither; it names the position and the type.
    """
    if isinstance(prompts, dict):
        return [_within(prompts, "prompts")]
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, _NO_PROMPTS) or not isinstance(prompts, Iterable):
        raise _wrong("prompts", prompts)
    listed: list[Any] = list(prompts)
    if listed and all(isinstance(item, Integral) for item in listed):
        return [listed]
    for position, item in enumerate(listed):
        if isinstance(item, Integral):
            raise ValueError(
                f"prompts[{position}] is {item!r}, of type {type(item).__name__}, among prompts of "
                "another kind; a list holds prompts (text or lists of token ids), or is itself the "
                "token ids of one prompt"
            )
        if isinstance(item, dict):
            listed[position] = _within(item, f"prompts[{position}]")
        elif not isinstance(item, str | Iterable) or isinstance(item, _NO_PROMPTS):
            raise _wrong(f"prompts[{position}]", item)
    return listed


def _within(given: Any, where: str) -> PlainPrompt:
    """What a dict holds that vLLM takes as a prompt. Raises ``ValueError``."""
    if set(given) == {"prompt"} and isinstance(given["prompt"], str):
        return given["prompt"]
    held = given.get("prompt_token_ids")
    is_row = isinstance(held, Iterable) and not isinstance(held, (str, *_NO_PROMPTS))
    if set(given) == {"prompt_token_ids"} and is_row:
        return cast("Sequence[int]", held)
    raise ValueError(
        f"{where} is a dict with {', '.join(map(repr, given)) or 'nothing'}; a dict holds 'prompt' "
        "with text, or 'prompt_token_ids' with a list of token ids, and nothing else"
    )


def messages_of(prompts: Iterable[PlainPrompt]) -> Iterator[Prompt]:
    """Each prompt as the pipeline takes it, one after another. Raises ``ValueError``."""
    for position, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            check_text(prompt, f"prompts[{position}]")
            yield PromptText(prompt)
            continue
        try:
            packed = array("i", prompt)
        except (TypeError, OverflowError) as error:
            raise ValueError(
                f"prompts[{position}]: a prompt is text or a list of token ids: {error}"
            ) from None
        yield Tokens(packed.tobytes())


def chats_of(
    messages: Sequence[Message] | Sequence[Sequence[Message]], variables: dict[str, Any] | None
) -> list[Chat]:
    """One conversation, or each of a list of them. variables: those of the chat template. Raises
    ``ValueError``."""
    given: TemplateVariables = read(variables or {}, TemplateVariables, "chat_template_kwargs")
    encoded = msgspec.json.encode(given)
    several = isinstance(messages, list | tuple) and all(
        isinstance(one, list | tuple) for one in messages
    )
    if several:
        return [_chat(one, f"messages[{index}]", encoded) for index, one in enumerate(messages)]
    return [_chat(messages, "messages", encoded)]


def one_prompt(given: PromptLike) -> tuple[PlainPrompt, Prompt]:
    """A prompt as it was given and as the pipeline takes it. Raises ``ValueError``."""
    listed = list_of_prompts(given)
    if len(listed) != 1:
        raise ValueError(f"{len(listed)} prompts were given; one request has one")
    (prompt,) = messages_of(listed)
    return listed[0], prompt


def tools_of(
    tools: Sequence[dict[str, Any]] | None, tool_choice: str | dict[str, Any] | None
) -> OutputFormat:
    """How the answers to chats are read. Raises ``ValueError``."""
    declared: list[ToolDeclaration] = read(list(tools or ()), ToolDeclarations, "tools")
    _check_hints(hints_of_chat(None, [], declared), "tools")
    asked: ToolMode | ToolChoice = read(tool_choice or "auto", ToolChoiceField, "tool_choice")
    return output_format([tool.function for tool in declared], chosen(asked))


def _chat(messages: Any, where: str, variables: bytes) -> Chat:
    given = read_messages(messages, where)
    _check_hints(hints_of_chat(None, given), where)
    return Chat(encode_messages(given, where), variables)


def _check_hints(hints: CacheHints | None, where: str) -> None:
    if hints is not None:
        raise ValueError(
            f"{where}: {FIELD} is known to the HTTP API alone; leave it out, or start a server"
        )


def _wrong(where: str, value: Any) -> ValueError:
    return ValueError(
        f"{where} is of type {type(value).__name__}; a prompt is text or a list of token ids"
    )
