"""``penstock embed``: vectors of texts, a JSON object a line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import msgspec

from penstock.services.commands.failure import WRONG_USE, CommandError
from penstock.services.commands.parser import (
    URL_HELP,
    CommandParser,
    add_key_flag,
    client,
    served_model,
)

DEFAULT_BATCH = 32


def parser() -> CommandParser:
    parser = CommandParser(
        "embed",
        "[TEXT …] [flags]",
        "Make an embedding of each text, and print it as a JSON object on a line of its own: "
        "index, text, embedding.",
    )
    parser.add_argument(
        "TEXT", nargs="*", help="texts; without any, each line of standard input is one"
    )
    parser.add_argument("--url", metavar="URL", help=URL_HELP)
    add_key_flag(parser)
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="one of the server's models (default: the first that makes vectors)",
    )
    parser.add_argument(
        "--dimensions",
        type=_positive,
        metavar="N",
        help="length of the vectors, if the model allows",
    )
    parser.add_argument(
        "--batch-size", type=_positive, default=DEFAULT_BATCH, metavar="N",
        help=f"texts in one request (default: {DEFAULT_BATCH})",
    )  # fmt: skip
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    parsed = parser().parse_args(arguments)
    server = client(parsed.url, parsed.api_key, environment)
    model = served_model(server, parsed.model, "embed")
    body: dict[str, object] = {"model": model, "encoding_format": "float"}
    if parsed.dimensions:
        body["dimensions"] = parsed.dimensions
    index = 0
    for texts in _batches(parsed.TEXT or _lines(), parsed.batch_size):
        answer = server.post("/v1/embeddings", {**body, "input": texts})
        try:
            rows = sorted(answer["data"], key=lambda row: row["index"])
            vectors = [row["embedding"] for row in rows]
        except (KeyError, TypeError) as error:
            raise CommandError(f"the server's answer holds no embeddings ({error!r})") from None
        if len(vectors) != len(texts):
            raise CommandError(f"{len(vectors)} embeddings came for {len(texts)} texts")
        for text, vector in zip(texts, vectors, strict=True):
            line = {"index": index, "text": text, "embedding": vector}
            sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
            index += 1
        sys.stdout.flush()
    return 0


def _lines() -> Iterator[str]:
    if sys.stdin.isatty():
        raise CommandError("name a TEXT, or give one a line on standard input", WRONG_USE)
    for line in sys.stdin:
        if text := line.rstrip("\r\n"):
            yield text


def _batches(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    rest = iter(texts)
    while batch := list(islice(rest, size)):
        yield batch
