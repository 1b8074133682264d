"""What can be completed, as the commands' own parsers declare it."""

from __future__ import annotations

import argparse
import re

import msgspec

from penstock.services.command_table import COMMANDS, TOOLS, parser_of

_FILES = re.compile(r"FILE|PATH|FOLDER|MODEL|URL")
_CHOICES = re.compile(r"\{([^}]*)\}")


class Flag(msgspec.Struct, frozen=True):
    """One flag in all its spellings."""

    spellings: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...] = ()
    files: bool = False
    """Its value is a path."""
    repeated: bool = False


class Completable(msgspec.Struct, frozen=True):
    """A command; one of several words, as ``keys add``, has them with blanks."""

    name: str
    summary: str
    flags: tuple[Flag, ...] = ()
    words: tuple[str, ...] = ()
    """What may stand as its first argument."""
    files: bool = False
    """Its arguments are paths."""


def commands() -> list[Completable]:
    """All that there are, each sub-command behind the command that it belongs to."""
    found: list[Completable] = []
    for name, command in (COMMANDS | TOOLS).items():
        parser = parser_of(name)
        if parser is None:
            found.append(Completable(name, command.summary))
        elif name == "bench":
            found += _bench(command.summary)
        else:
            found += _of(name, command.summary, parser)
    return found


def _bench(summary: str) -> list[Completable]:
    """Flags of two of them: the other modules import torch."""
    from penstock.loadtest import bench
    from penstock.loadtest.client import serve_options
    from penstock.loadtest.reports import bench_report

    flags = {"serve": _flags(serve_options.parser()), "report": _flags(bench_report.parser())}
    return [
        Completable("bench", summary, words=tuple(bench.COMMANDS)),
        *(
            Completable(f"bench {name}", about, flags.get(name, ()), files=name == "report")
            for name, about in bench.COMMANDS.items()
        ),
    ]


def _of(name: str, summary: str, parser: argparse.ArgumentParser) -> list[Completable]:
    subs = next(
        (one for one in parser._actions if isinstance(one, argparse._SubParsersAction)), None
    )
    positional = [one for one in parser._actions if not one.option_strings and one is not subs]
    words = tuple(subs.choices) if subs else ()
    for one in positional:
        words += tuple(map(str, one.choices or ()))
    files = any(_FILES.search(str(one.metavar or one.dest)) for one in positional)
    found = [Completable(name, summary, _flags(parser), words, files)]
    for word, sub in (subs.choices if subs else {}).items():
        found += _of(f"{name} {word}", sub.description or "", sub)
    return found


def _flags(parser: argparse.ArgumentParser) -> tuple[Flag, ...]:
    if hasattr(parser, "show_all"):
        parser.show_all()
    shown = [one for one in parser._actions if one.option_strings]
    return tuple(_flag(one) for one in shown if one.help != argparse.SUPPRESS)


def _flag(action: argparse.Action) -> Flag:
    metavar = str(action.metavar or "")
    listed = _CHOICES.fullmatch(metavar)
    choices = tuple(listed[1].split(",")) if listed else tuple(map(str, action.choices or ()))
    takes_value = action.nargs != 0
    return Flag(
        tuple(action.option_strings),
        _plain(action),
        takes_value,
        choices,
        files=takes_value and not choices and bool(_FILES.search(metavar.replace("URL", ""))),
        repeated=isinstance(action, argparse._AppendAction),
    )


def _plain(action: argparse.Action) -> str:
    """The beginning of its help, in a line."""
    text = " ".join((action.help or "").replace("%%", "%").split())
    return re.split(r"[;.](?: |$)| \[| \(", text)[0]
