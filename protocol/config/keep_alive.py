"""How long a model that nobody uses stays awake, as people write it: ``10m``."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_WRITTEN = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h|d)?")
FOR_EVER = "-1"
"""A model with this stays awake, as with Ollama."""


def seconds_of(text: str) -> float | None:
    """Seconds; a number without a unit is one of seconds. ``None`` for ``FOR_EVER``.

    Raises ``msgspec.ValidationError``.
    """
    if text == FOR_EVER:
        return None
    found = _WRITTEN.fullmatch(text)
    if found is None:
        raise msgspec.ValidationError(
            f"expected a time as 90s, 10m or 2h, 0 for none, or {FOR_EVER} for ever"
        )
    return float(found[1]) * _UNITS[found[2] or "s"]


def keep_alive_of(models: Sequence[str], given: Sequence[str]) -> dict[str, float | None]:
    """Of each model by name: ``given`` has one for all or one for each; without one all stay
    awake."""
    if not given:
        return dict.fromkeys(models)
    each = given if len(given) > 1 else [given[0]] * len(models)
    return {model: seconds_of(text) for model, text in zip(models, each, strict=True)}
