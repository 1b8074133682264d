"""Whether an answer is valid for a JSON schema, judged by the package jsonschema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

import jsonschema
from jsonschema import ValidationError, validators

Pairs = list[tuple[str, Any]]


def faults(schema: dict[str, Any], text: str) -> list[str]:
    """What is wrong with ``text``, an answer: nothing, if it is valid.

    Where an object has a name twice, some readers take the first value and some the last: both must
    be valid.
    """
    validator = _validator(json.dumps(schema))
    found = []
    for hook in (_last, _first):
        try:
            value = json.loads(text, object_pairs_hook=hook, parse_float=_Written)
        except ValueError as error:
            return [f"no JSON: {error}"]
        found += [
            f"{error.json_path}: {error.message[:200]}" for error in validator.iter_errors(value)
        ]
    return found


class _Written(float):
    """A float that remembers its digits."""

    def __new__(cls, text: str) -> _Written:
        made = super().__new__(cls, text)
        made.text = text
        return made

    text: str


def _last(pairs: Pairs) -> dict[str, Any]:
    return dict(pairs)


def _first(pairs: Pairs) -> dict[str, Any]:
    return dict(reversed(pairs))


@lru_cache(maxsize=64)
def _validator(schema_text: str) -> Any:
    schema = json.loads(schema_text)
    base = validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    base.check_schema(schema)
    made = validators.extend(
        base,
        {
            "multipleOf": _multiple_of,
            "pattern": _pattern,
            "minimum": _bound(lambda value, bound: value >= bound),
            "maximum": _bound(lambda value, bound: value <= bound),
            "exclusiveMinimum": _bound(lambda value, bound: value > bound),
            "exclusiveMaximum": _bound(lambda value, bound: value < bound),
        },
    )
    return made(schema, format_checker=base.FORMAT_CHECKER)


def _exactly(value: Any) -> Fraction | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    text = getattr(value, "text", repr(value))
    if abs(Decimal(text).adjusted()) > 400:
        return None  # A fraction of so many digits would take for ever.
    return Fraction(text)


def _multiple_of(_: Any, step: float, value: Any, __: Any) -> Iterator[ValidationError]:
    """With the digits as they are written: as floats, 0.3 is no multiple of 0.1."""
    exactly = _exactly(value)
    if exactly is not None and exactly % Fraction(repr(step)):
        yield ValidationError(f"{value!r} is not a multiple of {step}")


def _bound(holds: Callable[[Fraction, Fraction], bool]) -> Callable[..., Iterator[ValidationError]]:
    def check(_: Any, bound: float, value: Any, __: Any) -> Iterator[ValidationError]:
        exactly = _exactly(value)
        if exactly is not None and not holds(exactly, Fraction(repr(bound))):
            yield ValidationError(f"{value!r} is beyond {bound}")

    return check


def _pattern(_: Any, pattern: str, value: Any, __: Any) -> Iterator[ValidationError]:
    r"""With ECMA-262's ``\d`` and ``\w``, which are ASCII, and its ``$``, which is the end."""
    translated = pattern.removesuffix("$") + r"\Z" if pattern.endswith("$") else pattern
    if isinstance(value, str) and not re.search(translated, value, re.ASCII):
        yield ValidationError(f"{value!r} does not match {pattern!r}")
