"""``penstock completion``: scripts by which shells complete its commands and their flags."""

from penstock.services.commands.completion.command import main, parser

__all__ = ["main", "parser"]
