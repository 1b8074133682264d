"""The flags that the commands have in common."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from penstock.protocol.config.flags import URL_FLAGS, FlagParser
from penstock.services.commands.api_client import ApiClient
from penstock.services.commands.endpoint import DEFAULT_URL, URL_VARIABLE, endpoint
from penstock.services.commands.failure import CommandError
from penstock.services.commands.printable import one_line
from penstock.services.commands.server_answers import model_cards
from penstock.services.commands.servers_here import url_here

SAMPLING_FLAGS = ("max_tokens", "temperature", "top_p", "seed", "stop")
"""Sampling parameters with a flag of their own; ``--set`` takes any."""
URL_HELP = (
    "the server (default: OPENAI_BASE_URL, else the one in PENSTOCK_RUNTIME_DIR, else the only one "
    f"of yours that runs on this host, else {DEFAULT_URL})"
)


class CommandParser(FlagParser):
    """Flags, and what a command is about in front of them or between."""

    def __init__(self, name: str, usage: str, description: str) -> None:
        super().__init__(
            f"penstock {name}",
            usage=f"penstock {name} {usage}".rstrip(),
            description=description,
            allow_abbrev=False,
        )

    def _refuse(self, parsed: argparse.Namespace, extra: Sequence[str]) -> NoReturn:
        if all(not argument.startswith("-") for argument in extra):
            self.error(f"unexpected argument {extra[0]!r}")
        super()._refuse(parsed, extra)

    def _unknown(self, flag: str) -> str:
        if flag in URL_FLAGS and "--url" not in self._option_string_actions:
            named = [one.metavar or one.dest for one in self._actions if not one.option_strings]
            if any("URL" in name for name in named):
                return f"unknown flag {flag}: give the URL alone: {self.prog} {DEFAULT_URL}"
        return super()._unknown(flag)


def add_key_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="the server's key, or file:PATH (default: OPENAI_API_KEY where OPENAI_BASE_URL names "
        "the server, else PENSTOCK_API_KEY)",
    )


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Their values stay text until ``settings.sampling``."""
    from penstock.protocol.sampling import PARAMETERS

    for name in SAMPLING_FLAGS:
        parser.add_argument(
            "--" + name.replace("_", "-"),
            metavar="VALUE",
            action="append" if name == "stop" else "store",
            help=PARAMETERS[name].description,
        )
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="any other parameter of the request, as --set top_k=20; may be repeated",
    )


def client(url: str | None, key: str | None, environment: Mapping[str, str]) -> ApiClient:
    """Of the server that is meant (``URL_HELP``). Raises ``CommandError``."""
    if not url and not environment.get(URL_VARIABLE):
        url = url_here(environment)
    return ApiClient(endpoint(url, key, environment))


def given(parsed: argparse.Namespace) -> dict[str, Any]:
    """The sampling flags that were given, by parameter."""
    found = {name: getattr(parsed, name) for name in SAMPLING_FLAGS}
    return {name: value for name, value in found.items() if value is not None}


def served_model(server: ApiClient, named: str | None, task: str = "generate") -> str:
    """The model to ask: ``named``, else the server's first one that does the task, as far as it
    tells what they do. Raises ``CommandError``."""
    if named:
        return named
    cards, url = model_cards(server), server.endpoint.url
    if not cards:
        raise CommandError(f"{url} serves no model at present")
    for card in cards:
        if card.tasks is None or task in card.tasks:
            return card.id
    done = ", ".join(dict.fromkeys(one for card in cards for one in card.tasks or ()))
    raise CommandError(f"{url} serves no model that does {task!r}; its models do: {one_line(done)}")
