"""The configuration file that a tuning ends with: settings, each below its reason."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.protocol.config.resolve import HIDDEN, fields
from penstock.protocol.config.shown import is_hidden, toml
from penstock.services.command_table import COMMANDS

_WIDTH = 98


def written(
    settings: Mapping[str, Any],
    reasons: Mapping[str, str] | None = None,
    head: Sequence[str] = (),
) -> str:
    """A TOML file for ``penstock serve --config``.

    settings: values by name; reasons: of some of them, in sentences; head: paragraphs that the file
    begins with. A secret that stands in no file of its own is left out, and a comment says so.
    """
    lines = [line for paragraph in head for line in (*_comment(paragraph), "#")][:-1]
    for group in COMMANDS["serve"].groups:
        names = [name for name in fields([group]) if name in settings]
        if not names:
            continue
        lines += ["", f"[{group}]"]
        for name in names:
            value = settings[name]
            lines += _comment((reasons or {}).get(name, ""))
            if is_hidden(name, value):
                lines.append(f"# {name} = {HIDDEN}: give it again, or as file:PATH")
            else:
                lines.append(f"{name} = {toml(value)}")
    return "\n".join(lines).lstrip("\n") + "\n"


def _comment(text: str) -> list[str]:
    """In lines; a line break stays one."""
    return [
        f"# {line}".rstrip()
        for part in (text.splitlines() if text else [])
        for line in textwrap.wrap(part, _WIDTH, break_long_words=False, break_on_hyphens=False)
    ]
