"""``penstock models``: what a server serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from penstock.services.commands.parser import URL_HELP, CommandParser, add_key_flag, client
from penstock.services.commands.printable import one_line
from penstock.services.commands.server_answers import Card, cards_of
from penstock.services.commands.table import table


def parser() -> CommandParser:
    parser = CommandParser("models", "[URL] [flags]", "List the models that a server serves.")
    parser.add_argument("URL", nargs="?", help=URL_HELP)
    add_key_flag(parser)
    parser.add_argument("--json", action="store_true", help="print the server's list as it is")
    return parser


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    parsed = parser().parse_args(arguments)
    server = client(parsed.URL, parsed.api_key, environment)
    found = server.get("/v1/models")
    cards = cards_of(found, server.endpoint.url)
    if parsed.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
        return 0
    print(table(("model", "context", "also called"), _rows(cards)))
    return 0


def _rows(cards: Sequence[Card]) -> list[tuple[str, str, str]]:
    """A model in each row; its other names are cards of their own, which name it as their root."""
    aliases: dict[str, list[str]] = {}
    for card in cards:
        root = card.root or card.id
        named = aliases.setdefault(root, [])
        if card.id != root:
            named.append(card.id)
    context = {card.root or card.id: card.max_model_len for card in cards}
    return [
        (
            one_line(root),
            "" if context[root] is None else f"{context[root]:,} tokens",
            ", ".join(map(one_line, others)),
        )
        for root, others in aliases.items()
    ]
