"""An engine that is away for a while: all that is asked meanwhile waits for it."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

from support.pipeline.served import Served

LATE = ("--fault", "worker:delay=4@Attach=2")
"""A second scheduler has to wait for its worker."""
Others: TypeAlias = Callable[[Served], str]
MODEL = "waited-for"


def is_ready(server: Served) -> bool:
    try:
        with urllib.request.urlopen(server.url + "/ready", timeout=10):
            return True
    except urllib.error.HTTPError:
        return False


def without_engine(server: Served) -> None:
    """Kill the scheduler, and return when everybody knows."""
    for process in server.processes().values():
        if server.role_of(process) == "scheduler":
            process.kill()
    while is_ready(server):
        time.sleep(0.01)


def all_wait(
    server: Served,
    requests: list[tuple[str, dict[str, Any]]],
    others: Sequence[Others] = (),
    model: str = MODEL,
) -> tuple[dict[str, Any], list[str]]:
    """Ask everything while the engine is away. Returns the answers by their paths, and what others
    have said."""

    def posted(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return server.post(path, {"model": model, **body})

    for path, body in requests:
        assert posted(path, body)[0] == 200, path
    without_engine(server)
    with ThreadPoolExecutor(20) as threads:
        asked = {path: threads.submit(posted, path, body) for path, body in requests}
        said = [threads.submit(other, server) for other in others]
        assert not is_ready(server)
        found = {path: one.result(60) for path, one in asked.items()}
        assert {path: status for path, (status, _) in found.items()} == dict.fromkeys(found, 200)
        answers = {path: answer for path, (_, answer) in found.items()}
        return answers, [one.result(60) for one in said]
