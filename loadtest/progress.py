"""One line on the terminal that says how far a run is."""

from __future__ import annotations

import asyncio
import sys
from statistics import median

from penstock.loadtest.client.load import Load

REFRESH_S = 0.5
RECENT = 200
"""Answers over which the shown TTFT is taken."""
CLEAR = "\r\x1b[2K"


def note(text: str) -> None:
    """What is being measured; the next note, or ``CLEAR``, takes its place."""
    sys.stderr.write(CLEAR + text)
    sys.stderr.flush()


def line(load: Load, tokens_per_s: float) -> str:
    """The present state in one line of less than 100 characters."""
    outcomes = load.outcomes
    elapsed = max(load.elapsed(), 1e-9)
    recent = [o.first - o.started for o in outcomes[-RECENT:] if o.failure is None]
    ttft = f" · TTFT {median(recent) * 1e3:.0f} ms" if recent else ""
    errors = f" · {load.failed} failed" if load.failed else ""
    return (
        f"{len(outcomes)}/{load.planned} done · {len(load.running)} open · "
        f"{len(outcomes) / elapsed:.1f} requests/s · {tokens_per_s:.0f} chunks/s{ttft}{errors} · "
        f"{elapsed:.0f} s"
    )


def _chunks(load: Load, seen: int, total: int) -> tuple[int, int]:
    """Chunks so far: of ended answers (the first ``seen`` count ``total``) and of open ones."""
    ended = total + sum(len(o.stamps) for o in load.outcomes[seen:])
    return ended, sum(len(stream.stamps) for stream in load.running.values())


async def show_progress(load: Load) -> None:
    """Rewrite the line twice a second until cancelled; then remove it."""
    seen = total = before = 0
    then = load.elapsed()
    try:
        while True:
            await asyncio.sleep(REFRESH_S)
            total, still_open = _chunks(load, seen, total)
            seen = len(load.outcomes)
            now = load.elapsed()
            rate = (total + still_open - before) / (now - then) if now > then else 0.0
            before, then = total + still_open, now
            sys.stderr.write(CLEAR + line(load, max(rate, 0.0)))
            sys.stderr.flush()
    finally:
        sys.stderr.write(CLEAR)
        sys.stderr.flush()
