"""What ``--show-config`` prints: a TOML file that ``--config`` reads back to the same settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from penstock.protocol.config.api_keys import FILE
from penstock.protocol.config.fields import Config
from penstock.protocol.config.resolve import HIDDEN, MODEL, SECRET, fields
from penstock.protocol.config.sources import Provenance, Source


def show(config: Config, sources: Provenance, groups: Sequence[str]) -> str:
    """A table for each group, and in it a line for each setting with its source behind it.

    A comment stands where there is no value to write, as of one that is found later. In place of a
    secret stands a mark, which ``resolve`` refuses: a server must not run without its key because
    its settings were written down.
    """
    lines = []
    for group in groups:
        lines.append(f"[{group}]")
        for name in fields([group]):
            value = getattr(getattr(config, group), name)
            if name == MODEL and config.model.models:
                value = config.model.models
            lines.append(_line(name, value, _origin(sources[name])))
    return "\n".join(lines)


def _line(name: str, value: Any, origin: str) -> str:
    if value is None:
        return f"# {name}: {'not set' if origin == 'default' else origin}"
    return f"{name} = {toml(without_secrets(name, value))}  # {origin}"


def without_secrets(name: str, value: Any) -> Any:
    """A setting's value with ``HIDDEN`` for what is shown to nobody; where a file holds a secret,
    the file is shown."""
    if isinstance(value, list):
        return [without_secrets(name, part) for part in value]
    hidden = value and name in SECRET and not value.startswith(FILE)
    return HIDDEN if hidden or _has_password(value) else value


def _has_password(value: Any) -> bool:
    """Whether it is a URL with a password in it."""
    if not isinstance(value, str) or "://" not in value:
        return False
    return "@" in urlsplit(value).netloc


def _origin(source: Source) -> str:
    text = f"{source.origin} {source.detail}".rstrip()
    return " ".join(text.split())  # a path may hold anything, a comment ends with its line


def toml(value: Any) -> str:
    """A setting's value, as a TOML file holds it."""
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, str):
        # A JSON string is a TOML string too, but for DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else str(value)
