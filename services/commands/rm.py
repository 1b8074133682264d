"""``penstock rm``: models out of the hub's cache on this disk."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.protocol.process.running_servers import running_servers
from penstock.services.commands.failure import FAILED, WRONG_USE, CommandError
from penstock.services.commands.parser import CommandParser

if TYPE_CHECKING:
    from penstock.services.commands.hub_cache import CachedModel


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

    models = [cached_model(name) for name in dict.fromkeys(parsed.NAME)]
    _check_unserved(models, environment)
    if not parsed.yes:
        if not sys.stdin.isatty():
            raise CommandError("nobody can be asked without a terminal; say --yes", WRONG_USE)
        listed = ", ".join(f"{model.name} ({gigabytes(model.size)})" for model in models)
        if input(f"remove {listed}? [y/N] ").strip().lower() not in ("y", "yes"):
            return FAILED
        _check_unserved(models, environment)  # it may have been served meanwhile
    for model in models:
        remove(model)
        print(f"removed {model.name}: {gigabytes(model.size)} are free")
    return 0


def _check_unserved(models: Sequence[CachedModel], environment: Mapping[str, str]) -> None:
    """Raises ``CommandError`` where a server of this user serves one, by whatever path."""
    for server in running_servers(environment):
        served = [Path(folder).resolve() for folder in server.record.folders]
        for model in models:
            own = model.folder.resolve()
            if any(folder.is_relative_to(own) for folder in served):
                where = server.record.url or server.folder
                raise CommandError(f"{model.name} is served at {where}; stop that first", FAILED)
