"""Writes calls in a family's form, from its envelope."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.services.tokenizer.output.family import (
    ArgumentForm,
    Envelope,
    Family,
    Literals,
)


def written(family: Family, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The calls, each a name and its arguments, as a model of this family writes them."""
    envelope = family.envelope
    assert envelope is not None
    parts = [
        envelope.before_name.replace("{name}", name)
        + ("" if "{name}" in envelope.before_name else name)
        + envelope.after_name.replace("{index}", str(index))
        + _arguments(envelope, arguments)
        + envelope.end
        for index, (name, arguments) in enumerate(calls)
    ]
    return envelope.open + (envelope.separator or "").join(parts) + envelope.close


def _arguments(envelope: Envelope, arguments: Mapping[str, Any]) -> str:
    if envelope.form is ArgumentForm.JSON:
        return json.dumps(arguments, ensure_ascii=False)
    if envelope.literals is not None:
        syntax = envelope.literals
        return (", " if not syntax.quote else ",").join(
            f"{key}{syntax.assign}{literal(value, syntax)}" for key, value in arguments.items()
        )
    return "".join(_parameter(envelope, key, value) for key, value in arguments.items())


def literal(value: Any, syntax: Literals) -> str:
    """A value as a model writes it: as Python's ``repr``, or with the syntax's own quotes."""
    if not syntax.quote:
        return repr(value)
    if isinstance(value, str):
        return syntax.quote + value + syntax.quote
    if isinstance(value, Mapping):
        members = (f"{key}:{literal(one, syntax)}" for key, one in value.items())
        return f"{{{','.join(members)}}}"
    if isinstance(value, list):
        return f"[{','.join(literal(one, syntax) for one in value)}]"
    return json.dumps(value)


def _parameter(envelope: Envelope, key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    before = envelope.before_value if is_text else envelope.before_json or envelope.before_value
    shown = value if is_text else json.dumps(value, ensure_ascii=False)
    return before.replace("{key}", key) + shown + envelope.after_value
