"""Writes calls in a family's form, from its envelope."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.services.tokenizer.output.family import ArgumentForm, Envelope, Family


def written(family: Family, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The calls, each a name and its arguments, as a model of this family writes them."""
    envelope = family.envelope
    assert envelope is not None
    parts = [
        envelope.before_name
        + name
        + envelope.after_name.replace("{index}", str(index))
        + _arguments(envelope, arguments)
        + envelope.end
        for index, (name, arguments) in enumerate(calls)
    ]
    return envelope.open + (envelope.separator or "").join(parts) + envelope.close


def _arguments(envelope: Envelope, arguments: Mapping[str, Any]) -> str:
    if envelope.form is ArgumentForm.JSON:
        return json.dumps(arguments, ensure_ascii=False)
    return "".join(_parameter(envelope, key, value) for key, value in arguments.items())


def _parameter(envelope: Envelope, key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    before = envelope.before_value if is_text else envelope.before_json or envelope.before_value
    shown = value if is_text else json.dumps(value, ensure_ascii=False)
    return before.replace("{key}", key) + shown + envelope.after_value
