"""``penstock chat``: a conversation with a model on a terminal, or without one."""

from penstock.services.commands.chat.command import main, parser

__all__ = ["main", "parser"]
