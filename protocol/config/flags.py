"""The flags of a command, made from the declared fields."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from penstock.protocol.config.foreign import FOREIGN_SETTINGS
from penstock.protocol.config.resolve import MODEL, Field, fields, flag_of
from penstock.protocol.suggestions import closest

COMMON = frozenset(
    {
        *("model", "served_model_name", "max_model_len", "dtype", "device", "host", "port"),
        *("max_num_seqs", "gpu_memory_utilization", "data_parallel_size", "router", "api_key"),
        "log_level",
    }
)
"""Settings that ``--help`` shows, each by the beginning of its text; ``--help-all`` shows all."""
TEST_ONLY = frozenset({"null_step_ms", "fault"})
"""No help shows them."""
URL_FLAGS = ("--url", "--base-url", "--endpoint", "--server")
"""How commands and other programs take the address of a running server; of several that a command
has, the first one is meant."""
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

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.whole_help: dict[str, str] = {}
        """The text of each setting by its name, where ``--help`` shows less."""

    def show_all(self) -> None:
        """Have the help show each setting with its whole text, but those for tests."""
        for action in self._actions:
            action.help = self.whole_help.get(action.dest, action.help)
        self.whole_help = {}
        self.epilog = None

    def format_help(self) -> str:
        """Settings stand below the name of their group where all are shown, else together."""
        groups = self._action_groups
        if self.whole_help:
            settings = [one for one in self._actions if one.dest in self.whole_help]
            together = argparse.ArgumentParser(add_help=False).add_argument_group("common flags")
            together._group_actions += settings
            rest = [one for one in groups if not set(one._group_actions) & set(settings)]
            self._action_groups = [*rest, together]
        try:
            return super().format_help()
        finally:
            self._action_groups = groups

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
        if flag in URL_FLAGS:
            for known in URL_FLAGS:
                if known in self._option_string_actions:
                    return f"unknown flag {flag}: use {known}"
        name = flag.lstrip("-").replace("-", "_")
        here = [one.lstrip("-").replace("-", "_") for one in self._option_string_actions]
        if name not in here and name.removeprefix("no_") in fields():
            reader = "scheduler" if name == "role" else "serve"  # it is of one engine of several
            return f"unknown flag {flag}: {self.prog} does not read it, `penstock {reader}` does"
        return f"unknown flag {flag}" + FOREIGN_SETTINGS.advice(name, here, flag_of)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = list(map(str, action.choices))
        likely = closest(str(value), known)
        meant = f"did you mean {likely}? " if likely else ""
        raise argparse.ArgumentError(
            action, f"{value!r} is none of its values: {meant}there are {', '.join(known)}"
        )

    def _lists_all(self) -> str:
        return "--help-all" if self.whole_help else "--help"

    def error(self, message: str) -> NoReturn:
        """Ends with code 2. ``message``: one or more lines, each an error."""
        for theirs, ours in _REWORDED.items():
            message = message.replace(theirs, ours)
        lines = "".join(f"{self.prog}: error: {line}\n" for line in message.splitlines())
        usage = f"{self.format_usage()}{lines}`{self.prog} {self._lists_all()}` lists the flags\n"
        self.exit(WRONG_FLAGS, usage)


class _HelpAll(argparse.Action):
    def __call__(self, parser: Any, *_: Any, **__: Any) -> None:
        parser.show_all()
        parser.print_help()
        parser.exit()


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
    parser = FlagParser(
        program,
        usage=usage,
        description=description,
        epilog=f"`{program} --help-all` shows all flags.",
        allow_abbrev=False,
    )
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help="show all flags and exit")
    if positional_model:
        number = "*" if several_models else "?"
        parser.add_argument("MODEL", nargs=number, help="the same as --model")
    parser.add_argument(
        "--config", metavar="FILE", help="settings from a TOML or YAML file, by the flags' names"
    )
    parser.add_argument(
        "--show-config",
        action="store_true",
        help="print all settings and sources, as such a file",
    )
    for group in groups:
        section = parser.add_argument_group(group)
        for field in fields([group]).values():
            form = _form(field)
            if several_models and field.name == MODEL:
                form["action"] = "append"
            shown = _brief(field) if field.name in COMMON else argparse.SUPPRESS
            section.add_argument(field.flag, default=None, help=shown, **form)
            if field.name not in TEST_ONLY:
                parser.whole_help[field.name] = _help(field)
    return parser


def _form(field: Field) -> dict[str, Any]:
    """How a flag of this field takes its value."""
    if field.is_bool:
        return {"action": argparse.BooleanOptionalAction}
    if field.is_list:
        return {"action": "append", "metavar": "VALUE"}
    choices = "{" + ",".join(map(str, field.choices)) + "}"
    return {"metavar": choices if field.choices else "VALUE"}


def _brief(field: Field) -> str:
    """The first part of its text, and the default where that says something."""
    text = re.split(r"[;.](?: |$)", field.help)[0]
    default = "" if field.default in (None, "", []) else f" [{field.default}]"
    return f"{text}{default}".replace("%", "%%")


def _help(field: Field) -> str:
    again = " May be repeated." if field.is_list else ""
    default = {None: "derived", "": "none"}.get(_scalar(field.default), str(field.default))
    return f"{field.help}{again} [{default}] ({field.variable})".replace("%", "%%")


def _scalar(value: Any) -> Any:
    return "" if value == [] else value
