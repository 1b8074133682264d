"""Messages of the system that stand within a conversation, for templates that take one only at its
beginning.

Agents send them: what has changed, which tools there are by now. Qwen 3.5's template, Mistral's and
Gemma's refuse such a message, and others leave it out. Its text then joins what the user says
there, or what a tool has given, since a user's message behind that would be refused as well.
"""

from __future__ import annotations

from typing import Any

from penstock.services.tokenizer.template_tools import Render

_PROBE = "probe_system_7f3"
_BETWEEN = "\n\n"


def takes_late_system(render: Render) -> bool:
    """Whether the template shows a message of the system behind a user's."""
    messages = [{"role": "user", "content": "x"}, {"role": "system", "content": _PROBE}]
    try:
        return _PROBE in render(messages, None)
    except Exception:  # a template is foreign code: it may raise anything
        return False


def has_late_system(messages: list[dict[str, Any]]) -> bool:
    return any(map(_is_system, messages[1:]))


def with_early_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with none of the system but the first one."""
    out = messages[:1]
    was_system = False
    """The last one of ``out`` is the system's, in a user's words."""
    for message in messages[1:]:
        role, before = message.get("role"), out[-1].get("role")
        joins = before in ("system", "user", "tool") if role == "system" else was_system
        if joins and role in ("system", "user"):
            out[-1] = {**out[-1], "content": _joined(out[-1], message)}
            was_system &= role == "system"
        else:
            was_system = role == "system"
            out.append({**message, "role": "user"} if was_system else message)
    return out


def _is_system(message: dict[str, Any]) -> bool:
    return message.get("role") == "system"


def _joined(first: dict[str, Any], second: dict[str, Any]) -> str:
    return _BETWEEN.join(filter(None, (first.get("content"), second.get("content"))))
