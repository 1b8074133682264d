"""Bounds and multiples of numbers: those that the compiler enforces exactly.

It keeps bounds as 64-bit floats and turns them into regular expressions over the digits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from math import isfinite, lcm, trunc

from penstock.protocol.grammar.json_schema.keywords import SchemaRefused, shown
from penstock.protocol.grammar.json_schema.places import Place

EXACT = 2**53
"""Up to here, every whole number is a 64-bit float."""
DIGITS = 15
"""Decimal digits that a 64-bit float always holds exactly."""
MAX_SCALE = 22
MAX_COEFFICIENT = 2**32 - 1
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


@dataclass(frozen=True)
class Bound:
    """One bound of one schema: ``lower`` or upper, with or without the value itself."""

    place: Place
    keyword: str
    value: float

    @property
    def lower(self) -> bool:
        return "inimum" in self.keyword

    @property
    def exclusive(self) -> bool:
        return "exclusive" in self.keyword


def check_numbers(place: Place) -> None:
    """Refuse bounds and multiples that would be rounded."""
    schema = place.schema
    for keyword in BOUNDS:
        if keyword in schema:
            check_exact(schema[keyword], place.at(keyword))
    if "multipleOf" in schema:
        _check_multiple(schema["multipleOf"], place.at("multipleOf"))


def check_exact(value: float, where: str) -> None:
    """Refuse a number that the compiler may read as another, or that is no number.

    It reads digits as one integer and scales that by a power of ten: exact up to 2^53 and 10^22.
    """
    if abs(value) > EXACT or not isfinite(value):
        raise SchemaRefused(
            f"{where}: {shown(value)} is not enforced exactly; numbers in a schema may be at most "
            f"2^53 = {EXACT}; use a string with a pattern for larger ones"
        )
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    if int("".join(map(str, digits))) > EXACT or not -MAX_SCALE <= int(exponent) <= MAX_SCALE:
        raise SchemaRefused(
            f"{where}: {shown(value)} has more digits than are enforced exactly; use at most 15"
        )


def _check_multiple(value: float, where: str) -> None:
    check_exact(value, where)
    if value <= 0:
        raise SchemaRefused(f"{where}: multipleOf must be above 0, not {shown(value)}")
    # The compiler's own way from the float to digits.
    scaled, exponent = float(value), 0
    while scaled != trunc(scaled) and scaled <= MAX_COEFFICIENT:
        scaled, exponent = scaled * 10.0, exponent + 1
    meant = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    if scaled > MAX_COEFFICIENT or Decimal(int(scaled)).scaleb(-exponent) != meant:
        raise SchemaRefused(
            f"{where}: multipleOf {shown(value)} has too many digits to be enforced; use another "
            "step, such as whole units or a power of ten"
        )


def _bounds(place: Place) -> list[Bound]:
    """The bounds that a schema sets, where a number that is no integer may come."""
    types = place.schema.get("type", "number")
    if "number" not in (types if isinstance(types, list) else [types]):
        return []
    return [
        Bound(place, name, float(place.schema[name])) for name in BOUNDS if name in place.schema
    ]


def leaking_bounds(groups: Iterable[Iterable[Place]]) -> list[Bound]:
    """Exclusive bounds that the compiler would let through, because of another one.

    Between a whole number and a fraction right behind it (``0 < x <= 0.5``) it takes the whole
    number in, although it is excluded. ``groups`` are schemas whose bounds may meet.
    """
    leaking = []
    for group in groups:
        known = [bound for place in group for bound in _bounds(place)]
        fractions = {
            (bound.lower, bound.value > 0, trunc(bound.value)) for bound in known if bound.value % 1
        }
        leaking += [
            bound
            for bound in known
            if bound.exclusive
            and not bound.value % 1
            and (not bound.lower, bound.lower, int(bound.value)) in fractions
        ]
    return leaking


def close(bound: Bound) -> None:
    """Put the next number of 15 digits, which may come, in the place of an exclusive bound."""
    schema = bound.place.schema
    whole_digits = len(str(abs(int(bound.value)))) if bound.value else 0
    step = Decimal(1).scaleb(-(DIGITS - whole_digits))
    value = Decimal(int(bound.value)) + (step if bound.lower else -step)
    keyword, stricter = ("minimum", max) if bound.lower else ("maximum", min)
    del schema[bound.keyword]
    schema[keyword] = stricter(float(value), schema.get(keyword, float(value)))


def check_multiples(places: Iterable[Place]) -> None:
    """Refuse multiples whose common multiple overflows the 32 bits that the compiler has for it.

    It computes one where it merges schemas; which ones it merges is not looked into here.
    """
    found = [
        (Decimal(repr(place.schema["multipleOf"])), place.at("multipleOf"))
        for place in places
        if "multipleOf" in place.schema
    ]
    point = max((_places(value) for value, _ in found), default=0)
    scaled = [int(value.scaleb(point)) for value, _ in found]
    # A schema may be merged with itself, by two references.
    if scaled and lcm(*scaled) * max(scaled) > MAX_COEFFICIENT:
        named = ", ".join(f"{value:g} ({where})" for value, where in found[:3])
        raise SchemaRefused(
            f"multipleOf {named}: the common multiple is too large where schemas are merged "
            "(allOf, or a keyword beside $ref or anyOf); use rounder steps"
        )


def _places(value: Decimal) -> int:
    """Digits after the decimal point."""
    return max(0, -int(value.normalize().as_tuple().exponent))
