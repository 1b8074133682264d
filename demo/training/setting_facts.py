"""What the built-in model is taught of each setting, taken from the settings' own declarations.

``python -m penstock.demo.training.setting_facts`` writes ``skills/flags.json`` anew, ahead of a
training. The file stays as it is until then: it says what the model that ships was taught.
"""

from __future__ import annotations

import json
from pathlib import Path

from penstock.protocol.config.resolve import Field, fields

FILE = Path(__file__).parent.parent / "skills" / "flags.json"
LONGEST = 250
"""Most characters of a text; of a longer description its beginning is taught."""


def text_of(field: Field) -> str:
    """What a setting is for. Raises ``ValueError`` where that cannot be said in few words."""
    text = field.help
    for end in (". ", ": "):
        if len(text) > LONGEST:
            text = text.partition(end)[0].rstrip(".") + "."
    if len(text) > LONGEST:
        raise ValueError(f"{field.flag}: {len(text)} characters; at most {LONGEST} are taught")
    return text


def default_of(field: Field) -> str:
    """A default as people write it; empty: the setting has none."""
    default = field.default
    if isinstance(default, bool):
        return "on" if default else "off"
    if default is None or default == []:
        return ""
    return f"{default:g}" if isinstance(default, float) else str(default)


def declared() -> dict[str, dict[str, str]]:
    """All settings but those for tests, by their flags: ``text`` and ``default``."""
    return {
        field.flag: {"text": text_of(field), "default": default_of(field)}
        for field in fields().values()
        if field.group != "test"
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(declared(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
