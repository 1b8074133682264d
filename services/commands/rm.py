"""``penstock rm``: models out of the hub's cache on this disk."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from penstock.services.commands.failure import FAILED, WRONG_USE, CommandError
from penstock.services.commands.parser import CommandParser


def parser() -> CommandParser:
    parser = CommandParser(
        "rm",
        "ORG/NAME … [flags]",
        "Remove models with all their versions from the hub's cache on this disk.",
    )
    parser.add_argument("NAME", nargs="+", metavar="ORG/NAME", help="as `penstock list` shows it")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    return parser


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Returns 1 where the user says no. Raises ``CommandError``, before anything is removed."""
    parsed = parser().parse_args(arguments)
    from penstock.services.commands.hub_cache import cached_model, gigabytes, remove
    from penstock.services.launcher.running_servers import running_servers

    models = [cached_model(name) for name in dict.fromkeys(parsed.NAME)]
    for server in running_servers(environment):
        for model in models:
            if any(f"{folder}/".startswith(f"{model.folder}/") for folder in server.record.folders):
                where = server.record.url or server.folder
                raise CommandError(f"{model.name} is served at {where}; stop that first", FAILED)
    if not parsed.yes:
        if not sys.stdin.isatty():
            raise CommandError("nobody can be asked without a terminal; say --yes", WRONG_USE)
        listed = ", ".join(f"{model.name} ({gigabytes(model.size)})" for model in models)
        if input(f"remove {listed}? [y/N] ").strip().lower() not in ("y", "yes"):
            return FAILED
    for model in models:
        remove(model)
        print(f"removed {model.name}: {gigabytes(model.size)} are free")
    return 0
