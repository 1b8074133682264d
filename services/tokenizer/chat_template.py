"""The model's chat template: where it is stored, what it may see, and how messages become text.

The variables and their values are those of transformers' ``apply_chat_template``, so that equal
messages give equal text. Message content given as parts is flattened to one string first.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from penstock.protocol.model_info import BadModelFolder, read_json
from penstock.services.tokenizer.prompt_error import PromptError
from penstock.services.tokenizer.template_limits import TemplateLimitExceeded
from penstock.services.tokenizer.template_sandbox import MAX_SECONDS, TemplateSandbox
from penstock.services.tokenizer.template_text import written

SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
TEXT_PARTS = ("text", "input_text", "output_text")
PART_SEPARATOR = "\n"
"""What stands between the text parts of one message."""
RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "chat_template", "tokenize", *SPECIAL_TOKEN_NAMES}
)
"""What ``template_kwargs`` may not set."""
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
"""Names that count as the template's own: some build a control token around them."""
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")
_MAX_REASON = 300


def token_text(value: Any) -> str | None:
    """A special token as configurations write it: its text, or an object with ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """``tokenizer_config.json``; empty when the folder has none. Raises ``BadModelFolder``."""
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return {}
    config = read_json(path)
    if not isinstance(config, dict):
        raise BadModelFolder(f"{path}: expected an object")
    return config


def _read_source(folder: Path, config: dict[str, Any]) -> tuple[Path, str] | None:
    """The template's file and text: ``chat_template.jinja``, else ``tokenizer_config.json``."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path, path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadModelFolder(f"{path}: cannot be read: {error}") from None
    path = folder / "tokenizer_config.json"
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }
        template = named.get("default")
        if template is None:
            raise BadModelFolder(f"{path}: chat_template has no template named default")
    if template is None:
        return None
    if not isinstance(template, str):
        raise BadModelFolder(f"{path}: chat_template must be text or a list of named templates")
    return path, template


def _flatten(content: Any, where: str) -> str:
    """One string from message content. Raises ``PromptError`` that names the part at fault."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise PromptError(f"{where} must be text or a list of parts", where)
    texts = []
    for number, part in enumerate(content):
        place = f"{where}[{number}]"
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS:
            raise PromptError(
                f"{place}.type is {kind!r}; this model reads text parts only ({TEXT_PARTS[0]!r})",
                place,
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise PromptError(f"{place}.text must be a string", place)
        texts.append(text)
    return PART_SEPARATOR.join(texts)


def read_messages(encoded: bytes) -> list[dict[str, Any]]:
    """Decode and normalize the JSON array of messages. Raises ``PromptError``.

    Null fields and empty lists of calls count as absent, content becomes a string, and reasoning is
    given under each name that templates read it by.
    """
    try:
        messages = msgspec.json.decode(encoded)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PromptError(f"messages is not valid JSON: {error}", "messages") from None
    if not isinstance(messages, list) or not messages:
        raise PromptError("messages must be a list of at least one message", "messages")
    out = []
    for number, given in enumerate(messages):
        if not isinstance(given, dict):
            raise PromptError(f"messages[{number}] must be an object", "messages")
        message = {key: value for key, value in given.items() if value is not None}
        if message.get("tool_calls") == []:
            del message["tool_calls"]
        if "content" in message:
            message["content"] = _flatten(message["content"], f"messages[{number}].content")
        reasoning = next((message[name] for name in _REASONING_FIELDS if name in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        out.append(message)
    return out


def read_variables(encoded: bytes) -> dict[str, Any]:
    """Decode the JSON object of extra template variables. Raises ``PromptError``."""
    try:
        variables = msgspec.json.decode(encoded)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PromptError(
            f"chat_template_kwargs is not valid JSON: {error}", "chat_template_kwargs"
        ) from None
    if not isinstance(variables, dict):
        raise PromptError("chat_template_kwargs must be an object", "chat_template_kwargs")
    reserved = RESERVED_VARIABLES & variables.keys()
    if reserved:
        names = ", ".join(sorted(reserved))
        raise PromptError(f"chat_template_kwargs may not set {names}", "chat_template_kwargs")
    return variables


class ChatTemplate:
    """A compiled chat template. ``render`` is safe to call from several threads."""

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        *,
        path: Path,
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        """Compile. Raises ``BadModelFolder`` that names ``path`` and the line."""
        self.source = source
        self._sandbox = TemplateSandbox(max_seconds)
        self._special_tokens = {name: written(text) for name, text in special_tokens.items()}
        try:
            self._template = self._sandbox.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise BadModelFolder(
                f"{path}: the chat template is not valid: line {error.lineno}: {error.message}"
            ) from None
        except RecursionError:
            raise BadModelFolder(f"{path}: the chat template is nested too deeply") from None

    def render(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """The prompt's text. See ``render_traced``."""
        return self.render_traced(messages, variables)[0]

    def render_traced(
        self, messages: list[dict[str, Any]], variables: dict[str, Any]
    ) -> tuple[str, bytes]:
        """The prompt's text, and one byte for each of its characters: 1 where the template wrote
        it. Takes at most ``max_seconds`` and ``MAX_CHARACTERS``.

        Raises ``PromptError`` with the template's own words where it refuses the messages.
        """
        everything = {
            "messages": list(map(_with_known_role, messages)),
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **self._special_tokens,
            **variables,
        }
        try:
            return self._sandbox.render(self._template, everything)
        except TemplateLimitExceeded as error:
            raise PromptError(f"the chat template was stopped: {error}", "messages") from None
        except jinja2.TemplateError as error:
            raise PromptError(
                f"the chat template refuses these messages: {_reason(error)}", "messages"
            ) from None
        except Exception as error:  # a template is foreign code: it may raise anything
            raise PromptError(
                f"the chat template fails on these messages: {type(error).__name__}: "
                f"{_reason(error)}",
                "messages",
            ) from None


def _with_known_role(message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if isinstance(role, str) and role in _ROLES:
        return {**message, "role": written(role)}
    return message


def _reason(error: Exception) -> str:
    return _ADDRESS.sub("", str(error))[:_MAX_REASON]


def read_chat_template(
    folder: Path, config: dict[str, Any], special_tokens: dict[str, str]
) -> ChatTemplate | None:
    """The folder's template, or ``None`` where it has none. Raises ``BadModelFolder``."""
    found = _read_source(folder, config)
    return ChatTemplate(found[1], special_tokens, path=found[0]) if found else None
