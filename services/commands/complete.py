"""``penstock complete``: the continuation of a text, as it comes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from penstock.services.commands.failure import WRONG_USE, CommandError
from penstock.services.commands.parser import (
    URL_HELP,
    CommandParser,
    add_key_flag,
    add_sampling_flags,
    client,
    given,
    served_model,
)
from penstock.services.commands.printable import printable
from penstock.services.commands.settings import sampling

DEFAULT_MAX_TOKENS = 256


def parser() -> CommandParser:
    parser = CommandParser(
        "complete",
        "[PROMPT] [flags]",
        "Continue a text. On a terminal, what the terminal would obey is shown as signs; elsewhere "
        "the model's text is written as it is.",
    )
    parser.add_argument(
        "PROMPT", nargs="?", help="the text; without it, or as -, standard input is read"
    )
    parser.add_argument("--url", metavar="URL", help=URL_HELP)
    add_key_flag(parser)
    parser.add_argument("--model", metavar="NAME", help="one of the server's models")
    add_sampling_flags(parser)
    parser.add_argument("--echo", action="store_true", help="write the prompt first")
    return parser


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    parsed = parser().parse_args(arguments)
    body = {"max_tokens": DEFAULT_MAX_TOKENS, **sampling(given(parsed), parsed.set)}
    server = client(parsed.url, parsed.api_key, environment)
    prompt = _prompt(parsed.PROMPT)
    body |= {"model": served_model(server, parsed.model), "prompt": prompt}
    shown = printable if sys.stdout.isatty() else _writable
    if parsed.echo:
        sys.stdout.write(shown(prompt))
    last = "\n"
    for chunk in server.stream("/v1/completions", body):
        for choice in chunk.get("choices") or ():
            last = choice.get("text") or last
            sys.stdout.write(shown(choice.get("text") or ""))
        sys.stdout.flush()
    if not last.endswith("\n") and sys.stdout.isatty():
        print()
    return 0


def _prompt(given: str | None) -> str:
    if given not in (None, "-"):
        return str(given)
    if given is None and sys.stdin.isatty():
        raise CommandError("name a PROMPT, or give it on standard input", WRONG_USE)
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise CommandError(f"standard input is no text in {error.encoding}", WRONG_USE) from None
    if not text:
        raise CommandError("standard input is empty, and no PROMPT was named", WRONG_USE)
    return text


def _writable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
