"""Where a setting's value came from, and the error that a wrong one raises."""

from __future__ import annotations

import re

import msgspec


class ConfigError(ValueError):
    """One or more settings are wrong. The message names each, its source and what is allowed."""


class Source(msgspec.Struct, frozen=True):
    """Where a value came from: ``default``, ``file``, ``environment``, ``flag`` or ``derived``."""

    origin: str
    detail: str = ""


Provenance = dict[str, Source]
_FLAG = re.compile(r"--([a-z][a-z0-9-]*)")


def with_places(line: str, sources: Provenance) -> str:
    """An error, with the places of the settings in it that the environment or a file has given:
    whoever reads of a flag has not always typed it."""
    places = []
    for flag in dict.fromkeys(_FLAG.findall(line)):
        source = sources.get(flag.replace("-", "_"))
        if source is not None and source.origin in {"environment", "file"}:
            places.append(f"--{flag}: {source.origin} {source.detail}")
    return f"{line} ({'; '.join(places)})" if places else line
