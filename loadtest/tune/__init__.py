"""``penstock tune``: measures this machine and writes a configuration, with the reasons."""

from penstock.loadtest.tune.command import main, parser

__all__ = ["main", "parser"]
