"""A client's value, as an error message repeats it."""

from __future__ import annotations

from typing import Any

MAX_SHOWN = 80
"""Characters of it."""


def show(value: Any) -> str:
    """A client's value for an error message: ``repr``, but never long and never failing."""
    if isinstance(value, str):
        return repr(value) if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]!r}…"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int):
        digits = int(value.bit_length() * 0.30103) + 1  # str() refuses more than 4300 digits
        return str(value) if digits <= MAX_SHOWN else f"an integer of about {digits} digits"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    return f"a {type(value).__name__}"
