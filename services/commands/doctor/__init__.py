"""``penstock doctor``: what this machine has, and what would keep a server from working on it."""

from penstock.services.commands.doctor.command import main, parser

__all__ = ["main", "parser"]
