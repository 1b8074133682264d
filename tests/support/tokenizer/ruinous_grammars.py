"""The helper that vets grammars, in which some regexes do to the compiler what they are called. Run
with the seconds that each may take by the clock, where that is not what a server gives."""

from __future__ import annotations

import os
import sys
import time

from penstock.protocol.grammar.request import Grammar
from penstock.services.tokenizer import grammar_process
from penstock.services.tokenizer.grammar_process import walk

NAP_SECONDS = 0.25
"""Of real time, in which a good helper works."""


def ruinous_walk(grammar: Grammar, vocabulary: object) -> None:
    match grammar.source.rstrip("!"):
        case "abort":
            os.abort()
        case "segfault":
            os.kill(os.getpid(), 11)
        case "spin":
            while True:
                pass
        case "sleep":
            time.sleep(60)
        case "nap":
            time.sleep(NAP_SECONDS)
        case "eat":
            kept = []
            while True:
                kept.append(bytearray(1 << 24))
        case "shout":
            print("no frame" * 1000, flush=True)
            os.write(2, b"no log line")
        case "end the helper":
            os.kill(os.getppid(), 9)
            time.sleep(60)
        case "slowly":
            grammar_process.SLOW_SECONDS = -1.0
        case "leave":
            os._exit(0)
        case "interrupt":
            raise KeyboardInterrupt
    walk(grammar, vocabulary)  # type: ignore[arg-type]


if __name__ == "__main__":
    grammar_process.walk = ruinous_walk
    if sys.argv[1:]:
        grammar_process.WALL_SECONDS = float(sys.argv[1])
    sys.exit(grammar_process.main())
