"""Where a setting's value came from, and the error that a wrong one raises."""

from __future__ import annotations

import msgspec


class ConfigError(ValueError):
    """One or more settings are wrong. The message names each, its source and what is allowed."""


class Source(msgspec.Struct, frozen=True):
    """Where a value came from: ``default``, ``file``, ``environment``, ``flag`` or ``derived``."""

    origin: str
    detail: str = ""


Provenance = dict[str, Source]
