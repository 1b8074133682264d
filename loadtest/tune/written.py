"""The configuration file that a tuning ends with: settings, each below its reason."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.protocol.config.resolve import fields
from penstock.protocol.config.shown import toml, without_secrets
from penstock.services.command_table import COMMANDS

_WIDTH = 98


def written(
    settings: Mapping[str, Any],
    reasons: Mapping[str, str] | None = None,
    head: Sequence[str] = (),
) -> str:
    """A TOML file for ``penstock serve --config``.

    settings: values by name; reasons: of some of them, in sentences; head: paragraphs that the file
    begins with. In place of a secret that stands in no file of its own is a mark, which ``serve``
    refuses until the secret is given.
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
            lines.append(f"{name} = {toml(without_secrets(name, value))}")
    return "\n".join(lines).lstrip("\n") + "\n"


def _comment(text: str) -> list[str]:
    """In lines; a line break stays one."""
    return [
        f"# {line}".rstrip()
        for part in (text.splitlines() if text else [])
        for line in textwrap.wrap(part, _WIDTH, break_long_words=False, break_on_hyphens=False)
    ]
