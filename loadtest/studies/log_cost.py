"""What the log line of one request takes, in this process alone.

    python -m penstock.loadtest.studies.log_cost

Lines of a chat of one choice, as JSON, into a pipe that another process reads: so many at once, and
one every few milliseconds, as a server's requests end. The times are CPU of all threads, that which
writes included; of the second, what the same pauses take without lines is taken off.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

from penstock.protocol.process import logs
from penstock.services.frontend.generation import Generation
from penstock.services.frontend.request_log import log_request

LINES, TURNS, WARM_TURNS = 1000, 20, 3
PACED_LINES, PACED_TURNS = 300, 5
PAUSES_MS = (1, 3)
_REQUEST = SimpleNamespace(
    caller=SimpleNamespace(trace=""), key=SimpleNamespace(name="team-a"), error=None,
    request=SimpleNamespace(served="penstock-demo"), reasons=["length"], continuations=0,
    usage=SimpleNamespace(
        prompt=77, cached=64, completion=16, reasoning=0, accepted_drafts=0, rejected_drafts=0
    ),
    arrival=100.123456, queued_s=0.01234, first_at=100.33445, ended_at=100.987654,
    handed_over_s=-1.0,
)  # fmt: skip


def _line() -> None:
    generation = cast(Generation, _REQUEST)
    log_request("req-0123456789abcdef01234567", "/v1/chat/completions", 200, "", generation)


def _cost(work: Callable[[], None], count: int, pause_s: float = 0.0) -> float:
    """Microseconds of CPU of each of ``count`` turns of ``work``."""
    began = time.process_time()
    for _ in range(count):
        work()
        if pause_s:
            time.sleep(pause_s)
    logs.flush()
    return (time.process_time() - began) / count * 1e6


def _told(costs: list[float]) -> str:
    low, middle, high = statistics.quantiles(costs, n=4)
    return f"{middle:.1f} µs ({low:.1f} to {high:.1f})"


def main() -> None:
    code = "import os\nwhile os.read(0, 65536): pass"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as reader:
        if reader.stdin is None:
            raise RuntimeError("no pipe")
        os.dup2(reader.stdin.fileno(), 2)
        logs.set_up("frontend", "info", "json")
        at_once = [_cost(_line, LINES) for _ in range(WARM_TURNS + TURNS)][WARM_TURNS:]
        print(f"lines at once: {_told(at_once)}")
        for pause in PAUSES_MS:
            costs = []
            for _ in range(PACED_TURNS):
                nothing = _cost(lambda: None, PACED_LINES, pause / 1e3)
                costs.append(_cost(_line, PACED_LINES, pause / 1e3) - nothing)
            print(f"a line every {pause} ms: {_told(costs)}")
        reader.kill()


if __name__ == "__main__":
    main()
