"""``penstock pull``: a model of the Hugging Face hub, into its cache on this disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.services.commands.parser import CommandParser


def parser() -> CommandParser:
    parser = CommandParser(
        "pull",
        "ORG/NAME …",
        "Fetch models from the Hugging Face hub, as `penstock serve ORG/NAME` does, or their newer "
        "versions. What an interrupted download has fetched is kept and continued. HF_TOKEN, "
        "HF_HOME and HF_ENDPOINT mean what they mean to the hub's own tools.",
    )
    parser.add_argument("NAME", nargs="+", metavar="ORG/NAME", help="the model's name on the hub")
    return parser


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Prints the folder of each. Raises ``BadModelFolder``."""
    parsed = parser().parse_args(arguments)
    from penstock.protocol.model_hub import fetch_model

    for name in parsed.NAME:
        print(fetch_model(name), flush=True)
    return 0
