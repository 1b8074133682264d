"""The reference of the command line, from the parsers that read it.

It is a page of the site alone, so that no copy of it can lag behind the program.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from penstock.loadtest.bench import COMMANDS as BENCHES
from penstock.services.command_table import COMMANDS, HEADINGS, TOOLS, parser_of

BEGINNING = """# Commands and flags

This page is made from the program's own parsers. [Command line](cli.md) says how the commands are
used, and [configuration](configuration.md) how else settings can be given. A setting's default
stands in brackets, and its environment variable in parentheses.
"""
CODE = re.compile(r"(`[^`]*`)")
VARIABLE = re.compile(r"\((PENSTOCK_\w+)\)$")
MARKUP = re.compile(r"[|<*_\[\]]")
SERVING = ("plan", "tune", "warm")
"""They take the flags of ``serve``, whose texts stand there alone."""


def command_page() -> str:
    """The page as Markdown: each command below its heading of ``penstock --help``."""
    summaries = {name: command.summary for name, command in (COMMANDS | TOOLS).items()}
    parts = [BEGINNING]
    told: dict[str, str] = {}
    for heading, names in HEADINGS.items():
        parts.append(f"\n## {heading}\n")
        for name in names:
            parts += [f"\n### penstock {name}\n", f"\n{_sentence(summaries[name])}\n"]
            if name == "bench":
                parts += [
                    "\n",
                    *(f"- `penstock bench {one}`: {BENCHES[one]}.\n" for one in BENCHES),
                ]
            elif (parser := parser_of(name)) is not None:
                parts += _of_parser(parser, told if name in COMMANDS or name in SERVING else {})
                if name == "serve":
                    told = {flag: text for flag, _, text in _flags(parser)}
    return "".join(parts)


def _of_parser(parser: argparse.ArgumentParser, told: dict[str, str]) -> Iterator[str]:
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    yield f"\n```text\n{usage}\n```\n"
    subcommands = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    for group in subcommands:
        for name, inner in group.choices.items():
            yield f"\n`{parser.prog} {name}`: {inner.description or ''}\n"
            yield _table(_flags(inner))
    rows = list(_flags(parser))
    yield _table(row for row in rows if told.get(row[0]) != row[2])
    if same := [f"`{flag}`" for flag, _, text in rows if told.get(flag) == text]:
        yield f"\nThe following flags are those of `penstock serve`: {', '.join(same)}.\n"


def _flags(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, str]]:
    """Each flag or argument that a help shows: its name, its values, what it is for."""
    whole = getattr(parser, "whole_help", {})
    for action in parser._actions:
        text = whole.get(action.dest, action.help)
        if text in (None, argparse.SUPPRESS) or action.dest in ("help", "help_all", "command"):
            continue
        if isinstance(action, argparse._SubParsersAction):
            continue
        values = "" if action.nargs == 0 else action.metavar or ", ".join(action.choices or ())
        shown = str(text).replace("%%", "%").replace("%(default)s", str(action.default))
        name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        yield name, str(values), shown


def _table(rows: Iterator[tuple[str, str, str]]) -> str:
    lines = [
        f"| {_code(name)} | {_code(values)} | {_cell(text)} |\n" for name, values, text in rows
    ]
    return (
        "".join(["\n| flag | values | meaning |\n| --- | --- | --- |\n", *lines]) if lines else ""
    )


def _cell(text: str) -> str:
    """Text within a table. What looks like Markdown or HTML is shown as it is."""
    pieces = CODE.split(VARIABLE.sub(r"(`\1`)", " ".join(text.split())))
    pieces[::2] = (MARKUP.sub(r"\\\g<0>", piece) for piece in pieces[::2])
    return "".join(pieces)


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else ""


def _sentence(summary: str) -> str:
    return summary[0].upper() + summary[1:] + "."
