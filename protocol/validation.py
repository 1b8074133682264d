"""Values of clients, read as a declaration says: ``Declared`` structs with bounds on their fields.

``read`` goes through a value that msgspec refuses piece by piece. ``null`` counts as left out, a
field of another server that asks for nothing is dropped, and all that is wrong with an object is
told at once: its unknown names, and a sentence for each wrong field (``temperature is 3; 0 to 2 is
allowed``). Of an array the first wrong item is told.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from penstock.protocol.declared import (
    NO_ITEMS,
    Declared,
    SameAs,
    describe,
    fields_of,
    is_of_kind,
    kind_of,
    least_and_most,
    members_of,
    range_of,
    required,
    unwrapped,
)
from penstock.protocol.shown_values import show
from penstock.protocol.suggestions import ForeignNames

MAX_NAMED = 16
"""Names that one error lists."""
MAX_ADVISED = 4
"""The first of them are told with what was probably meant: the search takes 0.1 ms for each."""
MAX_WRONG = 8
"""Wrong fields of one object that are explained; of more the number is told."""
MAX_PARAM_LENGTH = 128
NOT_YET = "not supported yet"
_WRONG = (msgspec.ValidationError, OverflowError, RecursionError, UnicodeEncodeError)
"""The last is of Python's own strings: JSON brings none that has no UTF-8."""


class InvalidValue(ValueError):
    """A client's value is not what its declaration says; the message is one for the client.

    ``param`` is the parameter at fault (the first of several), without the place within an array;
    ``code`` is ``unknown_parameter`` or ``unsupported_parameter`` where a name is at fault.
    """

    def __init__(self, message: str, param: str, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


def read(value: Any, declared: Any, where: str = "") -> Any:
    """The value as its declaration has it. ``where`` is its name for errors; a body has none.

    declared: a type as msgspec takes it. Raises ``InvalidValue``.
    """
    value = _cleaned(value, declared)
    try:
        return msgspec.convert(value, declared, str_keys=True)
    except _WRONG as error:
        rule, said = error.__cause__, str(error)
    _explain(value, declared, where)
    if isinstance(rule, InvalidValue):  # of an object as a whole
        raise rule
    raise InvalidValue(f"{where or 'the value'}: {said}"[:200], _param(where))


def check_text(value: Any, where: str) -> None:
    """Raise ``InvalidValue`` for the first string within plain objects and arrays that has no UTF-8
    form, as Python's own may: it holds half of a surrogate pair."""
    if isinstance(value, str):
        if not _has_utf8(value):
            raise InvalidValue(
                f"{where or 'the value'} is {show(value)}, which holds half of a surrogate pair; "
                "remove it, or encode it with its other half as one character",
                _param(where),
            )
    elif isinstance(value, dict):
        for key, one in value.items():
            check_text(key, f"a name in {where}" if where else "a name")
            check_text(one, _place(where, key) if isinstance(key, str) else where)
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            check_text(one, f"{where}[{index}]")


def _has_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# --- what asks for nothing


def _cleaned(value: Any, declared: Any) -> Any:
    """The value without the fields of its objects that are null or ask for nothing."""
    if isinstance(value, dict):
        of = _object_in(declared)
        return value if of is None else _cleaned_object(value, of)
    if isinstance(value, list | tuple) and (of := _object_in_array(declared)) is not None:
        return [_cleaned_object(one, of) if isinstance(one, dict) else one for one in value]
    return value


def _cleaned_object(value: dict[Any, Any], declared: type[Declared]) -> dict[Any, Any]:
    neutral, within = declared.NEUTRAL, _fields_with_objects(declared)
    found = {}
    for name, one in value.items():
        if one is None or (name in neutral and _is_neutral(one, neutral[name], value)):
            continue
        found[name] = _cleaned(one, within[name]) if name in within else one
    return found


@cache
def _fields_with_objects(declared: type[Declared]) -> dict[str, Any]:
    return {
        name: of
        for name, of in fields_of(declared).items()
        if _object_in(of) is not None or _object_in_array(of) is not None
    }


@cache
def _object_in(declared: Any) -> type[Declared] | None:
    """The struct among the types of a union."""
    bases = (unwrapped(one)[0] for one in members_of(declared))
    return next((b for b in bases if isinstance(b, type) and issubclass(b, Declared)), None)


@cache
def _object_in_array(declared: Any) -> type[Declared] | None:
    """The struct whose array is among the types of a union."""
    bases = (unwrapped(one)[0] for one in members_of(declared))
    items = (get_args(base)[0] for base in bases if get_origin(base) is list)
    return next((of for item in items if (of := _object_in(item)) is not None), None)


def _is_neutral(value: Any, neutral: tuple[Any, ...] | SameAs, given: Mapping[str, Any]) -> bool:
    """Equal and of a like type: ``0`` is not ``false``, ``0`` and ``0.0`` are the same."""
    if isinstance(neutral, SameAs):
        wanted = given.get(neutral.name)
        neutral = (neutral.default if wanted is None else wanted,)
    return any(_is_same(value, one) for one in neutral)


def _is_same(value: Any, one: Any) -> bool:
    numbers = not isinstance(value, bool) and not isinstance(one, bool)
    numbers = numbers and isinstance(value, int | float) and isinstance(one, int | float)
    return (numbers or type(value) is type(one)) and bool(value == one)


# --- what is wrong


def _explain(value: Any, declared: Any, where: str) -> None:
    """Raise ``InvalidValue`` for what is wrong with a cleaned value, if anything is."""
    try:
        msgspec.convert(value, declared, str_keys=True)
        return None
    except _WRONG:
        pass
    if isinstance(value, str):
        check_text(value, where)
    for member in members_of(declared):
        base, bounds = unwrapped(member)
        if not is_of_kind(value, base):
            continue
        if isinstance(base, type) and issubclass(base, Declared):
            try:
                return _explain_object(value, base, where)
            except InvalidValue as invalid:
                invalid.param = _param(where) if base.IS_ONE_PARAM else invalid.param
                raise
        if kind_of(base) in (list, dict, str):
            _check_size(value, bounds, declared, where)
        if kind_of(base) is list:
            return _explain_array(value, get_args(base)[0], where)
        if (get_origin(base) or base) is dict:
            return _explain_mapping(value, base, where)
        if base in (int, float) and (allowed := range_of(bounds)):
            raise _fault(where, show(value), f"{allowed} is allowed")
        break
    raise _fault(where, show(value), f"{describe(declared)} is allowed")


def _fault(where: str, shown: str, allowed: str) -> InvalidValue:
    return InvalidValue(f"{where or 'the value'} is {shown}; {allowed}", _param(where))


def _param(where: str) -> str:
    return where.partition("[")[0][:MAX_PARAM_LENGTH]


def _check_size(value: Any, bounds: list[Meta], declared: Any, where: str) -> None:
    least, most = least_and_most(bounds)
    if len(value) < least:
        shown = "empty" if not value else show(value)
        raise _fault(where, shown, f"{describe(declared)} is allowed")
    if most is not None and len(value) > most:
        items = "characters" if isinstance(value, str) else "items"
        message = f"{where} has {len(value)} {items}; at most {most} are allowed"
        raise InvalidValue(message, _param(where))


# --- arrays and objects


def _explain_array(value: list[Any], item: Any, where: str) -> None:
    index = _first_wrong(list(value), item)
    _explain(value[index], item, f"{where}[{index}]")


def _first_wrong(value: list[Any], item: Any) -> int:
    """The place of the first wrong one, in as many calls as its binary logarithm."""
    right, wrong = 0, len(value)
    while wrong - right > 1:
        middle = (right + wrong) // 2
        try:
            msgspec.convert(value[right:middle], list[item], str_keys=True)
            right = middle
        except _WRONG:
            wrong = middle
    return right


def _explain_mapping(value: dict[Any, Any], base: Any, where: str) -> None:
    key_type, item = get_args(base) or (str, Any)
    for key, one in value.items():
        try:
            msgspec.convert(key, key_type, strict=key_type is str)
        except _WRONG:
            message = f"{where} has the key {show(key)}; {describe(key_type)} is allowed"
            raise InvalidValue(message, _param(where)) from None
        _explain(one, item, f"{where}[{show(key)}]")


def _explain_object(value: dict[Any, Any], declared: type[Declared], where: str) -> None:
    fields = fields_of(declared)
    for name, of in fields.items():  # first what says which others there may be
        if name in value and get_origin(unwrapped(of)[0]) is Literal:
            _explain(value[name], of, _place(where, name))
    names = _wrong_names(value, declared, where)
    try:
        _explain_fields(value, declared, where)
    except InvalidValue as wrong:
        if names is None:
            raise
        message = f"{names.message}; {wrong.message}"
        raise InvalidValue(message, names.param, names.code) from None
    if names is not None:
        raise names


def _explain_fields(value: dict[Any, Any], declared: type[Declared], where: str) -> None:
    faults: list[InvalidValue] = []
    for name, of in fields_of(declared).items():
        place = _place(where, name)
        if name in value:
            try:
                _explain(value[name], of, place)
            except InvalidValue as fault:
                faults.append(fault)
        elif name in required(declared):
            message = f"{place} is missing; {describe(of)} is required"
            faults.append(InvalidValue(message, _param(place)))
    if not faults:
        return
    told = [fault.message for fault in faults[:MAX_WRONG]]
    if (more := len(faults) - MAX_WRONG) > 0:
        told.append(f"and {more} more {'is' if more == 1 else 'are'} wrong")
    raise InvalidValue("; ".join(told), faults[0].param, faults[0].code)


def _place(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


# --- names


def _wrong_names(
    given: dict[str, Any], declared: type[Declared], where: str
) -> InvalidValue | None:
    """What names every unknown and unsupported field at once, if there are any."""
    unknown: list[str] = []
    unsupported: list[str] = []
    for name, value in given.items():
        if name in fields_of(declared):
            continue
        if name not in declared.NEUTRAL:
            unknown.append(str(name))
            continue
        if declared.NEUTRAL[name] is NO_ITEMS and not isinstance(value, list):
            return _fault(_place(where, name), show(value), "an array is allowed")
        unsupported.append(name)
    if not (unknown or unsupported):
        return None
    return _refusal(unknown, unsupported, declared, where)


def _refusal(
    unknown: list[str], unsupported: list[str], declared: type[Declared], where: str
) -> InvalidValue:
    within = f" in {where}" if where else ""
    foreign, known, parts = declared.FOREIGN, fields_of(declared), []
    if unknown:
        names = _names(unknown, foreign, known)
        listed = f"; known are {', '.join(known)}" if where else ""
        parts.append(f"unknown parameter{'s' * (len(unknown) > 1)}{within}: {names}{listed}")
    if unsupported:
        parts.append(f"{NOT_YET}{within}: {_names(unsupported, foreign, known, supported=False)}")
    param = _param(where) or (unknown or unsupported)[0][:MAX_PARAM_LENGTH]
    code = "unknown_parameter" if unknown else "unsupported_parameter"
    return InvalidValue("; ".join(parts), param, code)


def _names(
    names: list[str], foreign: ForeignNames, known: Collection[str], *, supported: bool = True
) -> str:
    """Names for an error, each with what to do about it where that is known. supported: they are
    unknown, and may be meant for others."""
    listed = []
    for index, name in enumerate(names[:MAX_NAMED]):
        found = foreign.advice(name, known, guesses=supported) if index < MAX_ADVISED else ""
        advice = found.removeprefix(": ")
        if not supported:  # it stands in a list that says so itself
            advice = advice.removeprefix(f"{NOT_YET}: ")
        listed.append(show(name).strip("'") + (f" ({advice})" if advice else ""))
    more = len(names) - MAX_NAMED
    return ", ".join(listed) + (f" and {more} more" if more > 0 else "")
