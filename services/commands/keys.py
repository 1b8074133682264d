"""``penstock keys``: makes, lists, stops and removes the keys of a file."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from penstock.protocol.config import ConfigError
from penstock.protocol.config.flags import FlagParser
from penstock.protocol.keys.key_file import (
    KeyFileError,
    Line,
    change_keys,
    line_of,
    read_keys,
)
from penstock.protocol.keys.record import ROLES, KeyLimits, KeyRecord, new_key
from penstock.protocol.plain_errors import plain_error
from penstock.protocol.suggestions import closest
from penstock.services.commands.table import table

VARIABLE = "PENSTOCK_KEYS_FILE"
_DURATION = re.compile(r"([1-9][0-9]{0,5})([dhm])")
_UNITS = {"d": "days", "h": "hours", "m": "minutes"}
LIMITS = {
    "requests_per_minute": "requests that it may begin in any minute",
    "tokens_per_minute": "tokens, of prompts and outputs, that it may use in any minute",
    "tokens_per_day": "the same of a day, which begins at midnight UTC",
    "concurrent": "requests that it may have open at the same time",
}
NO_KEYS_FILE = (
    f"--keys-file is missing: the file that `penstock serve --keys-file` reads ({VARIABLE} names "
    "it as well)"
)


class _KeyParser(FlagParser):
    """Refuses by itself what it does not know: the one above it has other flags."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, extra = super().parse_known_args(args, namespace)
        if extra:
            self._refuse(parsed, extra)
        return parsed, extra


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run one of them; returns the exit code. Raises ``ConfigError``."""
    parsed = parser().parse_args(arguments)
    named = parsed.keys_file or environment.get(VARIABLE, "")
    if not named:
        raise ConfigError(NO_KEYS_FILE)
    path = Path(named).expanduser()
    try:
        code: int = parsed.run(parsed, path)
    except KeyFileError as error:
        raise ConfigError(str(error)) from None
    return code


def parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        "penstock keys",
        description="Keys of clients, in a file that `penstock serve --keys-file` reads. A running "
        "server takes every change within seconds.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_KeyParser)

    def command(
        name: str, summary: str, run: Callable[[argparse.Namespace, Path], int], takes: str = ""
    ) -> argparse.ArgumentParser:
        one = commands.add_parser(
            name,
            usage=f"penstock keys {name} {takes}[flags]",
            help=summary,
            description=summary,
            allow_abbrev=False,
        )
        one.add_argument("--keys-file", metavar="PATH", help=f"the file; else {VARIABLE}")
        one.set_defaults(run=run)
        return one

    _describe_key(command("add", "Make a key and print it, this once.", _add, "NAME "))
    listing = command("list", "Show the keys; none can be shown as it was printed.", _list)
    listing.add_argument("--json", action="store_true", help="a JSON object a line")
    for name, summary in (
        ("remove", "Take a key out of the file, for good."),
        ("disable", "Refuse a key until it is enabled again."),
        ("enable", "Let a disabled key in again."),
    ):
        one = command(name, summary, _change, "NAME ")
        one.add_argument("name", metavar="NAME", help="name or id of the key")
        one.set_defaults(change=name)
    return parser


def _describe_key(adding: argparse.ArgumentParser) -> None:
    """The flags that say what a new key is for."""
    adding.add_argument("name", metavar="NAME", help="whose key it is; logs and errors show it")
    adding.add_argument(
        "--role",
        choices=ROLES,
        default="user",
        help="user: the APIs; metrics: /metrics; admin: everything (default: user)",
    )
    for name, said in LIMITS.items():
        adding.add_argument("--" + name.replace("_", "-"), type=int, metavar="N", help=said)
    adding.add_argument(
        "--model", action="append", default=[], metavar="NAME",
        help="a model that it may use; may be given several times (default: all)",
    )  # fmt: skip
    adding.add_argument(
        "--expires", metavar="WHEN", help="30d, 12h, 90m from now, or a time as 2027-01-31T12:00Z"
    )


def _add(parsed: argparse.Namespace, path: Path) -> int:
    expires = None if parsed.expires is None else _time(parsed.expires)
    try:
        limits = msgspec.convert({name: getattr(parsed, name) for name in LIMITS}, KeyLimits)
        key, record = new_key(
            parsed.name, parsed.role, limits=limits, models=parsed.model, expires=expires
        )
        msgspec.json.decode(line_of(record).text, type=KeyRecord)
    except msgspec.ValidationError as error:
        raise ConfigError(_wrong(parsed, error)) from None

    def added(lines: list[Line]) -> list[Line]:
        if any(line.record is not None and line.record.name == record.name for line in lines):
            raise KeyFileError(f"{path}: there is a key of the name {record.name} already")
        return [*lines, line_of(record)]

    change_keys(path, added)
    if sys.stdout.isatty():
        print(f"The key of {record.name}, which is shown only this once:", file=sys.stderr)
    print(key)
    return 0


def _wrong(parsed: argparse.Namespace, error: msgspec.ValidationError) -> str:
    for name in LIMITS:
        value = getattr(parsed, name)
        if value is not None and not 1 <= value <= 10**12:
            return f"--{name.replace('_', '-')} {value}: 1 to {10**12} is allowed"
    if "`$.name`" in str(error):
        return (
            f"NAME is {parsed.name!r}: letters, digits and . _ @ - are allowed, 64 at most, a "
            "letter or digit first"
        )
    return plain_error(error)


def _time(text: str) -> datetime:
    """Raises ``ConfigError``."""
    if found := _DURATION.fullmatch(text):
        after = timedelta(**{_UNITS[found[2]]: int(found[1])})
        return (datetime.now(UTC) + after).replace(microsecond=0)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"--expires {text}: expected a time from now (30d, 12h, 90m) or one as "
            "2027-01-31T12:00Z"
        ) from None
    when = when.replace(tzinfo=when.tzinfo or UTC)
    if when <= datetime.now(UTC):
        raise ConfigError(f"--expires {text} is over already")
    return when.astimezone(UTC)


def _list(parsed: argparse.Namespace, path: Path) -> int:
    records, now = read_keys(path), datetime.now(UTC)
    if parsed.json:
        for record in records:
            shown = {**msgspec.to_builtins(record), "state": _state(record, now)}
            shown.pop("hash")
            print(msgspec.json.encode(shown).decode())
        return 0
    rows = [("name", "id", "role", "state", "limits", "models")]
    for one in records:
        models = ", ".join(one.models) or "all"
        rows.append((one.name, one.id, one.role, _state(one, now), _limits(one), models))
    print(table(rows[0], rows[1:]))
    return 0


def _state(record: KeyRecord, now: datetime) -> str:
    if record.disabled:
        return "disabled"
    if record.expires is None:
        return "valid"
    when = record.expires.astimezone(UTC).strftime("%Y-%m-%d %H:%M")
    return f"expired {when}" if record.has_expired(now) else f"until {when}"


def _limits(record: KeyRecord) -> str:
    """In a few words: ``60 requests/min, 4 at once``."""
    amounts = (
        (record.requests_per_minute, "requests/min"),
        (record.tokens_per_minute, "tokens/min"),
        (record.tokens_per_day, "tokens/day"),
        (record.concurrent, "at once"),
    )
    return ", ".join(f"{count:,} {unit}" for count, unit in amounts if count is not None) or "none"


def _change(parsed: argparse.Namespace, path: Path) -> int:
    """Remove, disable or enable a key."""
    if not os.path.exists(path):  # a file that is made only to find nothing in it
        read_keys(path)

    def changed(lines: list[Line]) -> list[Line]:
        found = [line.record for line in lines if line.record is not None]
        target = next((one for one in found if parsed.name in (one.name, one.id)), None)
        if target is None:
            likely = closest(parsed.name, [one.name for one in found])
            meant = f"; did you mean {likely}?" if likely else ""
            raise KeyFileError(f"{path}: there is no key {parsed.name!r}{meant}")
        if parsed.change == "remove":
            return [line for line in lines if line.record is not target]
        after = msgspec.structs.replace(target, disabled=parsed.change == "disable")
        return [line_of(after) if line.record is target else line for line in lines]

    change_keys(path, changed)
    return 0
