"""One run of a load: its requests, and what is known of it when it is over."""

from __future__ import annotations

import asyncio
import resource
import signal
import sys
import time
from collections.abc import Sequence

import msgspec

from penstock.loadtest.client.load import Load, Outcome, SessionPlan, plans
from penstock.loadtest.client.prompts import Prompt
from penstock.loadtest.client.serve_options import ServeOptions
from penstock.loadtest.client.sessions import Answer
from penstock.loadtest.client.target import Target, TargetError, request_body
from penstock.loadtest.client.workload import Workload
from penstock.loadtest.progress import show_progress

SPARE_FILES = 64
"""Open files beside one connection a request."""


class MeasuredRun(msgspec.Struct, kw_only=True):
    outcomes: list[Outcome]
    duration: float
    """Seconds from the start to the end of the last response."""
    elapsed: float
    """Seconds to the end of the run."""
    unsent: int
    """Requests that were planned: later turns behind a failed one, what ``--max-seconds`` or an
    interruption cut off."""
    interrupted: int | None
    """Requests that were open when it was interrupted; ``None``: it was not."""
    cpus: list[float]
    """Seconds that each client process used."""


def session_plans(options: ServeOptions, workload: Workload) -> list[SessionPlan]:
    arrivals = workload.source.arrivals
    if arrivals is None:
        arrivals = options.arrivals(workload.sessions)
    return plans(arrivals, workload.source.turns)


def load_of(
    options: ServeOptions,
    target: Target,
    model: str,
    workload: Workload,
    sessions: Sequence[SessionPlan],
) -> Load:
    """What sends these of a workload's sessions."""
    several = any(session.turns > 1 for session in sessions)
    # The next prompt holds the very tokens of an answer, where they are told.
    extra = {"return_token_ids": True} if several and workload.joins_ids else {}
    extra |= options.sampling

    def make_request(index: int, answers: Sequence[Answer]) -> bytes:
        prompt = workload.source.prompt(index, answers)
        return target.post(request_body(prompt, model=model, chat=target.chat, extra=extra))

    return Load(
        target.pool,
        make_request,
        sessions,
        max_concurrency=options.max_concurrency,
        timeout=options.request_timeout,
        open_loop=options.open_loop,
        pause=options.think_time,
        max_seconds=options.max_seconds,
        keep_text=options.save_detailed or several,
    )


def measured(load: Load, cpu: float, interrupted: int | None) -> MeasuredRun:
    return MeasuredRun(
        outcomes=load.outcomes,
        duration=load.duration,
        elapsed=max(load.elapsed(), 1e-9),
        unsent=load.planned - len(load.outcomes) - (interrupted or 0),
        interrupted=interrupted,
        cpus=[cpu],
    )


async def warm_up(
    options: ServeOptions, target: Target, model: str, prompts: Sequence[Prompt]
) -> None:
    """Raises ``TargetError`` if one fails: nothing would be measured but that."""
    if not prompts:
        return

    def make_request(index: int, _: Sequence[Answer]) -> bytes:
        body = request_body(prompts[index], model=model, chat=target.chat, extra=options.sampling)
        return target.post(body)

    load = Load(
        target.pool,
        make_request,
        plans([0.0] * len(prompts)),
        max_concurrency=options.max_concurrency,
        timeout=options.request_timeout,
    )
    await load.run()
    for outcome in load.outcomes:
        if outcome.failure is not None:
            kind, message = outcome.failure.kind, outcome.failure.message
            raise TargetError(f"{target.url}{target.endpoint}: warm-up failed: {kind}: {message}")


async def run_here(load: Load, *, quiet: bool) -> MeasuredRun:
    """In this process, to the end or until SIGINT or SIGTERM."""
    loop = asyncio.get_running_loop()
    cpu = time.process_time()
    task = asyncio.create_task(load.run())
    interrupted: int | None = None

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = len(load.running)
        task.cancel()
        restore()  # the second signal ends the process

    def restore() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    shown = not quiet and sys.stderr.isatty()
    progress = asyncio.create_task(show_progress(load)) if shown else None
    try:
        await asyncio.wait([task])
    finally:
        if progress is not None:
            progress.cancel()
            await asyncio.wait([progress])
        restore()
    if interrupted is None:
        task.result()
    return measured(load, time.process_time() - cpu, interrupted)


def allow_files(connections: int) -> None:
    """Raise the limit of open files as far as needed. Raises ``TargetError``."""
    needed = connections + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise TargetError(
            f"{connections} connections need more open files than the limit of {hard}; "
            "lower --max-concurrency or raise it with ulimit -n"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
