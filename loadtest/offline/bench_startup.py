"""``penstock bench startup``: the time of ``penstock serve`` from the command to the first token.

Each start is a server of its own. *Cold* starts compile every kernel: Triton's cache is an empty
folder. *Warm* ones find in it what the last cold start left. Files that were read before are in the
system's page cache either way.

Exit codes: 0, 1 a server failed, 2 wrong flags, 130 interrupted.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec

from penstock.loadtest.client.load import Load, plans
from penstock.loadtest.client.prompts import Prompt
from penstock.loadtest.client.target import Target, TargetError, request_body
from penstock.loadtest.offline.offline_engine import described, engine_of, guarded, parser_for
from penstock.loadtest.options import integer
from penstock.loadtest.own_server import own_server
from penstock.loadtest.progress import note
from penstock.loadtest.reports import report
from penstock.services.library.server_process import ServerFailed, arguments_for

CACHES = ("cold", "warm")
ANSWER_S = 120.0
"""The first token may take so long."""
_PROMPT = Prompt(msgspec.Raw(b"[72,101,108,108,111]"), 1)
_PROCESS = re.compile(r"(?:router|tokenizer|scheduler|worker|frontend)(?: \d+)?")
_MEASURES = re.compile(r"( for)? \d.*$|\s*\(.*\)$")
"""What differs from start to start, at the end of a phase's name."""


class _Line(msgspec.Struct):
    """What matters here of a log line of the launcher."""

    event: str
    service: str = ""
    process: str = ""


class Phase(msgspec.Struct):
    """What a process does from ``began`` on; seconds since the command."""

    process: str
    name: str
    began: float
    seconds: float | None = None
    """``None``: it is ready."""


class Start(msgspec.Struct):
    """One start of a server. Seconds since the command."""

    cache: str
    phases: list[Phase]
    ready: float
    """When the server said so, after it had answered over HTTP."""
    first_token: float


def main(arguments: Sequence[str]) -> int:
    """Run with these flags. Returns the exit code."""
    parser = parser_for("startup", "Start servers, and ask each for one token.")
    group = parser.add_argument_group("what is measured")
    group.add_argument(
        "--runs", type=integer(1, 1000), default=3, metavar="N",
        help="starts with an empty kernel cache, and as many with a full one (default: 3)",
    )  # fmt: skip
    parsed = parser.parse_args(arguments)
    engine = engine_of(parsed)
    shown = not parsed.quiet and sys.stderr.isatty()

    def measure() -> dict[str, Any]:
        flags = arguments_for({"log_level": "info", **engine.settings})
        starts: dict[str, list[Start]] = {cache: [] for cache in CACHES}
        with tempfile.TemporaryDirectory(prefix="penstock-startup-") as place:
            for cache in CACHES:
                for run in range(parsed.runs):
                    if shown:
                        note(f"{cache} start {run + 1} of {parsed.runs}")
                    folder = os.path.join(place, str(run if cache == "cold" else parsed.runs - 1))
                    starts[cache].append(start_once(flags, cache, folder))
        return {
            **described("startup", arguments, engine),
            **{cache: _summary(starts[cache]) for cache in CACHES},
            "starts": [start for cache in CACHES for start in starts[cache]],
        }

    return guarded(measure, _table, parsed)


def start_once(flags: Sequence[str], cache: str, folder: str) -> Start:
    """Start a server, take its first token, end it. folder: of compiled kernels. Raises
    ``ServerFailed``."""
    environment = {**os.environ, "TRITON_CACHE_DIR": folder}
    environment.pop("PENSTOCK_API_KEY", None)
    phases: list[Phase] = []
    began = time.perf_counter()

    def on_line(line: str) -> None:
        add_phase(phases, line, time.perf_counter() - began)

    with own_server(flags, environment, on_line) as url:
        ready = time.perf_counter() - began
        answered = asyncio.run(_first_token(url)) - began
    return Start(cache, phases, ready, answered)


def add_phase(phases: list[Phase], line: str, now: float) -> None:
    """Take a line of the server's output; what names no new phase of a process is left out."""
    try:
        record = msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError:
        return
    if record.service != "launcher" or not _PROCESS.fullmatch(record.process):
        return
    process, name = record.process, _MEASURES.sub("", record.event)
    last = next((phase for phase in reversed(phases) if phase.process == process), None)
    if last is not None and last.name == name:
        return
    if last is None:
        phases.append(Phase(process, "start", 0.0, now))
    elif last.seconds is None:
        last.seconds = now - last.began
    if name != "ready":
        phases.append(Phase(process, name, now))


async def _first_token(url: str) -> float:
    """Ask for one token, streamed; the clock's time when it came."""
    target = Target(url, "/v1/completions", {})
    try:
        model = (await target.wait_ready(ANSWER_S))[0].id
    except TargetError as error:
        raise ServerFailed(str(error)) from error
    body = request_body(_PROMPT, model=model, chat=False, extra={"ignore_eos": True})
    load = Load(
        target.pool, lambda *_: target.post(body), plans([0.0]), max_concurrency=1, timeout=ANSWER_S
    )
    began = time.perf_counter()
    await load.run()
    (outcome,) = load.outcomes
    if outcome.failure is not None:
        raise ServerFailed(f"{url}: {outcome.failure.kind}: {outcome.failure.message}")
    return began + outcome.first


def _summary(starts: Sequence[Start]) -> dict[str, Any]:
    """Medians of all starts with one kind of cache, and the extremes of the whole."""
    found: dict[tuple[str, str], list[float]] = {}
    for start in starts:
        for phase in start.phases:
            found.setdefault((phase.process, phase.name), []).append(phase.seconds or 0.0)
    tokens = [start.first_token for start in starts]
    return {
        "phases": [
            {"process": process, "phase": name, "seconds": median(seconds)}
            for (process, name), seconds in found.items()
        ],
        "ready_seconds": median(start.ready for start in starts),
        "first_token_seconds": median(tokens),
        "least_first_token_seconds": min(tokens),
        "most_first_token_seconds": max(tokens),
    }


def _table(result: dict[str, Any]) -> str:
    """A line for each phase, a column for each kind of cache."""
    lines: dict[tuple[str, str], dict[str, Any]] = {}

    def enter(process: str, phase: str, cache: str, seconds: float) -> None:
        empty = {"process": process, "phase": phase, **dict.fromkeys(CACHES)}
        lines.setdefault((process, phase), empty)[cache] = seconds

    for cache in CACHES:
        for phase in result[cache]["phases"]:
            enter(phase["process"], phase["phase"], cache, phase["seconds"])
    lines = {key: lines[key] for key in sorted(lines, key=lambda key: key[0])}  # keeps the phases'
    for name, text in (
        ("ready_seconds", "ready"),
        ("first_token_seconds", "first token"),
        ("least_first_token_seconds", "first token, least"),
        ("most_first_token_seconds", "first token, most"),
    ):
        for cache in CACHES:
            enter("all", text, cache, result[cache][name])
    columns = {"process": "process", "phase": "phase", "cold": "cold s", "warm": "warm s"}
    return report.table(columns, list(lines.values()))
