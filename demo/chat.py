"""Conversations as the chat template writes them: ChatML, Hermes tools, think tags.

``CHAT_TEMPLATE`` is what the model's folder holds; ``render`` writes the same text faster, and
says which parts of it the model has to say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.demo.exchange import SPLIT, Exchange, Tool, plain
from penstock.demo.mixture import Conversation

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""One token each, but part of the text: parsers read them."""
END = "<|im_end|>"
NO_THINKING = "<think>\n\n</think>\n\n"
_TOOLS_BEFORE = "# Tools\n\nYou may call one of these functions to help the user.\n<tools>"
_TOOLS_AFTER = (
    "\n</tools>\n\nTo call a function, answer with its name and arguments as JSON:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
CHAT_TEMPLATE = r"""{%- set before = "# Tools\n\nYou may call one of these functions to help the user.\n<tools>" %}
{%- set after = "\n</tools>\n\nTo call a function, answer with its name and arguments as JSON:\n"
    ~ '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' %}
{%- set first = messages[0].role == "system" %}
{%- if tools %}
    {{- "<|im_start|>system\n" }}
    {%- if first %}{{- messages[0].content ~ "\n\n" }}{%- endif %}
    {{- before }}
    {%- for tool in tools %}{{- "\n" ~ (tool | tojson) }}{%- endfor %}
    {{- after ~ "<|im_end|>\n" }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else "" %}
    {%- if message.role == "tool" %}
        {{- "<|im_start|>user\n<tool_response>\n" ~ content ~ "\n</tool_response><|im_end|>\n" }}
    {%- elif message.role == "assistant" %}
        {%- if "</think>" in content %}
            {%- set content = content.split("</think>")[-1].lstrip("\n") %}
        {%- endif %}
        {{- "<|im_start|>assistant\n" ~ content }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {%- if content or not loop.first %}{{- "\n" }}{%- endif %}
            {{- '<tool_call>\n{"name": "' ~ function.name ~ '", "arguments": ' }}
            {%- if function.arguments is string %}{{- function.arguments }}
            {%- else %}{{- function.arguments | tojson }}{%- endif %}
            {{- "}\n</tool_call>" }}
        {%- endfor %}
        {{- "<|im_end|>\n" }}
    {%- elif not (tools and first and loop.first) %}
        {{- "<|im_start|>" ~ message.role ~ "\n" ~ content ~ "<|im_end|>\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\n" }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- "<think>\n\n</think>\n\n" }}
    {%- endif %}
{%- endif %}
"""

Part = tuple[str, bool]
"""A piece of text, and whether the model is trained to say it."""


def tools_text(tools: Sequence[Tool]) -> str:
    """What the system message says about the offered tools."""
    listed = "".join(f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in tools)
    return _TOOLS_BEFORE + listed + _TOOLS_AFTER


def system_text(conversation: Conversation) -> str | None:
    """The whole system message; ``None``: there is none."""
    parts = [conversation.system] if conversation.system else []
    if conversation.tools:
        parts.append(tools_text(conversation.tools))
    return "\n\n".join(parts) if parts else None


def asked(exchange: Exchange) -> str:
    """The text of the user's turn; a tool's answer is wrapped."""
    if exchange.role == "tool":
        return f"<tool_response>\n{exchange.question}\n</tool_response>"
    return exchange.question


def messages(conversation: Conversation) -> list[dict[str, Any]]:
    """The conversation up to its last question, as clients send it."""
    found: list[dict[str, Any]] = []
    if system := system_text(conversation):
        found.append({"role": "system", "content": system})
    for exchange in conversation.exchanges:
        found.append({"role": "user", "content": asked(exchange)})
        found.append({"role": "assistant", "content": plain(exchange.answer)})
    return found[:-1]


def prompt_text(conversation: Conversation) -> str:
    """What the model reads before it answers the last question."""
    parts = list(_parts(conversation))
    while parts[-1][1] or not parts[-1][0].startswith("<|im_start|>assistant"):
        parts.pop()
    return plain("".join(text for text, _ in parts))


def _parts(conversation: Conversation) -> Iterator[Part]:
    if system := system_text(conversation):
        yield f"<|im_start|>system\n{system}<|im_end|>\n", False
    *earlier, last = conversation.exchanges
    for exchange in earlier:
        yield f"<|im_start|>user\n{asked(exchange)}<|im_end|>\n", False
        yield "<|im_start|>assistant\n", False
        # Earlier thinking is not shown, so that an answer that needs it cannot be learned here.
        yield exchange.answer + END, not exchange.thinking
        yield "\n", False
    yield f"<|im_start|>user\n{asked(last)}<|im_end|>\n", False
    if not conversation.enable_thinking:
        yield f"<|im_start|>assistant\n{NO_THINKING}", False
        yield last.answer + END, True
        return
    yield "<|im_start|>assistant\n", False
    thinking = f"<think>\n{last.thinking}\n</think>\n\n" if last.thinking else ""
    yield thinking + last.answer + END, True


def render(conversation: Conversation) -> list[Part]:
    """The conversation in pieces that are encoded one by one and then joined."""
    return [
        (piece, trained)
        for text, trained in _parts(conversation)
        for piece in text.split(SPLIT)
        if piece
    ]
