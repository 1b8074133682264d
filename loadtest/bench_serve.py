"""``penstock bench serve``: load on an OpenAI-compatible server.

Exit codes: 0 every request was answered, 1 some failed or the server cannot be used, 2 wrong flags
or dataset, 130 interrupted (what was measured until then is printed).

One process and one event loop; docs/loadtest.md says what is measured and how.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop

from penstock.loadtest import report
from penstock.loadtest.api_key import key_for
from penstock.loadtest.arrivals import arrival_times
from penstock.loadtest.dataset_file import BadDataset
from penstock.loadtest.environment import date, environment
from penstock.loadtest.load import Load
from penstock.loadtest.progress import show_progress
from penstock.loadtest.prompts import Prompt
from penstock.loadtest.serve_options import ServeOptions, parse
from penstock.loadtest.serve_result import serve_result
from penstock.loadtest.target import ServedModel, Target, TargetError, request_body
from penstock.loadtest.workload import Workload

FAILED, WRONG_FLAGS, INTERRUPTED = 1, 2, 130
SPARE_FILES = 64
"""Open files beside one connection a request."""


def main(arguments: Sequence[str]) -> int:
    """Run with these flags. Returns the exit code."""
    options = parse(arguments)
    try:
        key = key_for(options.base_url, options.api_key, os.environ)
        options = msgspec.structs.replace(options, api_key=key or None)
        path = _result_path(options)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_bench(options, arguments, path))
    except TargetError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return FAILED
    except BadDataset as error:
        print(f"penstock: {error}", file=sys.stderr)
        return WRONG_FLAGS
    except OSError as error:
        print(f"penstock: {error.filename}: {error.strerror}", file=sys.stderr)
        return WRONG_FLAGS
    except KeyboardInterrupt:  # before there was anything to print, or the second one
        return INTERRUPTED


async def _bench(options: ServeOptions, arguments: Sequence[str], path: Path | None) -> int:
    target = Target(options.base_url, options.endpoint, _headers(options))
    workload = Workload(options, chat=target.chat)
    named = options.model is not None
    model = _model(options, await target.wait_ready(options.ready_timeout, named=named))
    workload.check_lengths(model.max_model_len)
    version = await target.version()
    _allow_files(min(options.max_concurrency or options.num_prompts, options.num_prompts))
    await _warm_up(options, target, model.id, workload.warmup)
    arrivals = arrival_times(
        options.num_prompts, options.request_rate, options.burstiness, options.seed
    )
    load = _load(options, target, model.id, workload.prompts, arrivals)
    cpu = time.process_time()
    interrupted = await _run(load, quiet=options.quiet)
    cpu = time.process_time() - cpu
    known = {**environment("penstock bench serve", arguments), "server": target.server}
    result = {
        **options.metadata,
        "date": date(),
        "backend": "openai-chat" if target.chat else "openai",
        "base_url": target.url,
        "endpoint": target.endpoint,
        "model_id": model.id,
        **serve_result(options, load, workload, cpu=cpu, interrupted=interrupted),
        "environment": {**known, "server_version": version},
    }
    print(report.serve_table(result, options.percentile_metrics, options.metric_percentiles))
    if path is not None:
        report.save(result, path)
        print(f"\nsaved in {path}")
    if interrupted is not None:
        return INTERRUPTED
    return FAILED if result["failed"] else 0


def _headers(options: ServeOptions) -> dict[str, str]:
    headers = dict(options.header)
    if options.api_key and not any(name.lower() == "authorization" for name in headers):
        headers["Authorization"] = f"Bearer {options.api_key}"
    return headers


def _model(options: ServeOptions, served: list[ServedModel]) -> ServedModel:
    if options.model is None:
        if not served:
            raise TargetError(f"{options.base_url} has no /v1/models; name the model with --model")
        return served[0]
    return next((m for m in served if m.id == options.model), ServedModel(options.model))


def _load(
    options: ServeOptions, target: Target, model: str, prompts: list[Prompt], arrivals: list[float]
) -> Load:
    def make_request(index: int) -> bytes:
        body = request_body(prompts[index], model=model, chat=target.chat, extra=options.sampling)
        return target.post(body)

    return Load(
        target.pool,
        make_request,
        arrivals,
        max_concurrency=options.max_concurrency,
        timeout=options.request_timeout,
        keep_text=options.save_detailed,
    )


async def _warm_up(
    options: ServeOptions, target: Target, model: str, prompts: list[Prompt]
) -> None:
    """Raises ``TargetError`` if one fails: nothing would be measured but that."""
    if not prompts:
        return
    load = _load(options, target, model, prompts, [0.0] * len(prompts))
    await load.run()
    for outcome in load.outcomes:
        if outcome.failure is not None:
            kind, message = outcome.failure.kind, outcome.failure.message
            raise TargetError(f"{target.url}{target.endpoint}: warm-up failed: {kind}: {message}")


async def _run(load: Load, *, quiet: bool) -> int | None:
    """Run to the end, or until SIGINT or SIGTERM; returns then how many requests were open."""
    loop = asyncio.get_running_loop()
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
    return interrupted


def _allow_files(connections: int) -> None:
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


def _result_path(options: ServeOptions) -> Path | None:
    """Where the JSON goes; its folder is made and tried before the run. Raises ``OSError``."""
    if options.save_result is None:
        return None
    path = Path(options.result_dir) / (options.save_result or f"bench-serve-{date()}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab"):
        return path
