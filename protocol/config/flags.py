"""The flags of a command, made from the declared fields."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from penstock.protocol.config.foreign import FOREIGN_SETTINGS
from penstock.protocol.config.resolve import MODEL, Field, fields, flag_of

WRONG_FLAGS = 2
"""Exit code."""
_REWORDED = {
    "expected one argument": "expected a value behind it",
    "ignored explicit argument": "expected no value, got",
}
"""What argparse says of a flag's value, and what is said for it."""


class FlagParser(argparse.ArgumentParser):
    """Values stay text until ``resolve``. A flag takes one value; a list's flag may be repeated.

    An error is told in a few lines, not behind the whole list of flags.
    """

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, extra = self.parse_known_args(args, namespace)
        if isinstance(getattr(parsed, "MODEL", None), list):
            # Behind a flag argparse has done with the positional arguments.
            parsed.MODEL += [argument for argument in extra if not argument.startswith("-")]
            extra = [argument for argument in extra if argument.startswith("-")]
        if extra:
            self._refuse(parsed, extra)
        return parsed

    def _refuse(self, parsed: argparse.Namespace, extra: Sequence[str]) -> NoReturn:
        """Ends with code 2 and says what ``extra``, which belongs to no flag, might be."""
        # What stands behind an unknown flag is probably its value.
        if flags := [argument for argument in extra if argument.startswith("-")]:
            self.error("\n".join(self._unknown(flag.partition("=")[0]) for flag in flags))
        model = getattr(parsed, "MODEL", None)
        if model is None:
            self.error(f"unexpected argument {extra[0]!r}: there are only flags here")
        self.error(
            f"unexpected argument {extra[0]!r}: MODEL is {model!r} already. A flag takes one "
            "value; repeat the flag to give it another"
        )

    def _unknown(self, flag: str) -> str:
        name = flag.lstrip("-").replace("-", "_")
        here = [one.lstrip("-").replace("-", "_") for one in self._option_string_actions]
        if name not in here and name.removeprefix("no_") in fields():
            return f"unknown flag {flag}: {self.prog} does not read it, `penstock serve` does"
        return f"unknown flag {flag}" + FOREIGN_SETTINGS.advice(name, here, flag_of)

    def error(self, message: str) -> NoReturn:
        """Ends with code 2. ``message``: one or more lines, each an error."""
        for theirs, ours in _REWORDED.items():
            message = message.replace(theirs, ours)
        lines = "".join(f"{self.prog}: error: {line}\n" for line in message.splitlines())
        usage = f"{self.format_usage()}{lines}`{self.prog} --help` lists the flags\n"
        self.exit(WRONG_FLAGS, usage)


def build_parser(
    program: str,
    description: str,
    groups: Sequence[str],
    positional_model: bool = False,
    *,
    several_models: bool = False,
) -> FlagParser:
    """A parser with the flags of ``groups``."""
    models = "[MODEL …] " if several_models else "[MODEL] " if positional_model else ""
    usage = f"{program} {models}[flags]"
    parser = FlagParser(program, usage=usage, description=description, allow_abbrev=False)
    if positional_model:
        number = "*" if several_models else "?"
        parser.add_argument("MODEL", nargs=number, help="the same as --model")
    parser.add_argument("--config", metavar="FILE", help="TOML or YAML file with the same keys")
    parser.add_argument(
        "--show-config", action="store_true", help="print each value and its source"
    )
    for group in groups:
        section = parser.add_argument_group(group)
        for field in fields([group]).values():
            form = _form(field)
            if several_models and field.name == MODEL:
                form["action"] = "append"
            section.add_argument(field.flag, default=None, help=_help(field), **form)
    return parser


def _form(field: Field) -> dict[str, Any]:
    """How a flag of this field takes its value."""
    if field.is_bool:
        return {"action": argparse.BooleanOptionalAction}
    if field.is_list:
        return {"action": "append", "metavar": "VALUE"}
    choices = "{" + ",".join(map(str, field.choices)) + "}"
    return {"metavar": choices if field.choices else "VALUE"}


def _help(field: Field) -> str:
    again = " May be repeated." if field.is_list else ""
    default = {None: "derived", "": "none"}.get(_scalar(field.default), str(field.default))
    return f"{field.help}{again} [{default}] ({field.variable})".replace("%", "%%")


def _scalar(value: Any) -> Any:
    return "" if value == [] else value
