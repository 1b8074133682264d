"""The flags of ``penstock completion``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.services.commands.parser import CommandParser

SHELLS = ("bash", "zsh", "fish")


def parser() -> CommandParser:
    parser = CommandParser(
        "completion",
        "SHELL",
        "Print a script that completes the commands and flags of penstock. bash: "
        "penstock completion bash > ~/.local/share/bash-completion/completions/penstock; zsh: "
        "penstock completion zsh > FOLDER/_penstock, in a folder of fpath; fish: "
        "penstock completion fish > ~/.config/fish/completions/penstock.fish",
    )
    parser.add_argument("SHELL", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")
    return parser


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    parsed = parser().parse_args(arguments)
    from penstock.services.commands.completion.declared import commands
    from penstock.services.commands.completion.scripts import SCRIPTS

    print(SCRIPTS[parsed.SHELL](commands()), end="")
    return 0
