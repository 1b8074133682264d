"""Parameters of a request, as a flag or ``/set`` writes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from penstock.protocol.foreign_parameters import FOREIGN_PARAMETERS
from penstock.protocol.sampling import PARAMETERS, parse_field
from penstock.protocol.validation import InvalidValue
from penstock.services.commands.failure import WRONG_USE, CommandError

OTHERS = (
    *("chat_template_kwargs", "reasoning_effort", "include_reasoning", "thinking_token_budget"),
    *("tools", "tool_choice", "parallel_tool_calls", "response_format", "priority", "deadline_s"),
    *("cache_salt", "user", "speculation", "deterministic"),
)
"""Fields of a request that are no sampling parameters; the server checks them."""
_WRITTEN_BY_COMMANDS = frozenset({"echo", "n"})
"""A command shows one answer, without its prompt."""


def names() -> list[str]:
    """What can be set."""
    return [name for name in (*PARAMETERS, *OTHERS) if name not in _WRITTEN_BY_COMMANDS]


def setting(name: str, text: str) -> tuple[str, Any]:
    """A parameter's name and value from their texts. Raises ``CommandError``.

    A value is JSON where it reads so, else a text: ``0.2``, ``[1, 2]``, ``high``.
    """
    name = name.strip().replace("-", "_")
    if name not in names():
        advice = FOREIGN_PARAMETERS.advice(name, names())
        raise CommandError(f"there is no parameter {name}{advice}", WRONG_USE)
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        value = text
    return name, _checked(name, value, text)


def _checked(name: str, value: Any, text: str) -> Any:
    if name not in PARAMETERS or name in ("structured_outputs", "logprobs"):
        return value
    if name == "stop":
        value = [text] if not isinstance(value, list) else value
    try:
        parse_field(name, value)
    except InvalidValue as error:
        raise CommandError(str(error), WRONG_USE) from None
    return value


def sampling(flags: Mapping[str, Any], pairs: Iterable[str]) -> dict[str, Any]:
    """Fields of a body from flags of their own and ``NAME=VALUE``. Raises ``CommandError``."""
    found: dict[str, Any] = {}
    for name, text in flags.items():
        if isinstance(text, list):
            text = msgspec.json.encode(text).decode()
        found[name] = setting(name, text)[1]
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise CommandError(f"--set {pair}: expected NAME=VALUE", WRONG_USE)
        name, value = setting(name, text)
        found[name] = value
    return found
