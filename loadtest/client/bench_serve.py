"""``penstock bench serve``: load on OpenAI-compatible servers.

Exit codes: 0 every request was answered, 1 some failed or the server cannot be used, 2 wrong flags
or dataset, 130 interrupted (what was measured until then is printed).

docs/loadtest.md says what is measured and how.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from penstock.loadtest.client.api_key import key_for
from penstock.loadtest.client.client_processes import run_in_processes
from penstock.loadtest.client.dataset_file import BadDataset
from penstock.loadtest.client.measured_run import (
    allow_files,
    load_of,
    run_here,
    session_plans,
    warm_up,
)
from penstock.loadtest.client.serve_options import ServeOptions, parse
from penstock.loadtest.client.serve_result import serve_result
from penstock.loadtest.client.target import ServedModel, Target, TargetError
from penstock.loadtest.client.workload import Workload
from penstock.loadtest.environment import date, environment
from penstock.loadtest.reports import report
from penstock.loadtest.reports.result_files import BadResult, by_server, check_runs

FAILED, WRONG_FLAGS, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str]) -> int:
    """Run with these flags. Returns the exit code."""
    options = parse(arguments)
    found: list[dict[str, Any]] = []
    try:
        servers = [
            msgspec.structs.replace(options, base_url=url, api_key=_key(url, options) or None)
            for url in (options.base_url, *options.other_urls)
        ]
        path = _file(options, options.save_result, "json")
        page = _file(options, options.report, "html")
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                is_cut = runner.run(_runs(servers, arguments, found))
        finally:  # what was measured before a server failed is not lost
            if found:
                _keep(found, path, page)
    except TargetError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return FAILED
    except (BadDataset, BadResult) as error:
        print(f"penstock: {error}", file=sys.stderr)
        return WRONG_FLAGS
    except OSError as error:
        print(f"penstock: {error.filename}: {error.strerror}", file=sys.stderr)
        return WRONG_FLAGS
    except KeyboardInterrupt:  # before there was anything to print, or the second one
        return INTERRUPTED
    if is_cut:
        return INTERRUPTED
    return FAILED if any(result["failed"] for result in found) else 0


def _key(url: str, options: ServeOptions) -> str:
    return key_for(url, options.api_key, os.environ)


async def _runs(
    servers: Sequence[ServeOptions], arguments: Sequence[str], found: list[dict[str, Any]]
) -> bool:
    """Each level of the sweep on each server, in turn: what the machine does meanwhile concerns all
    of them. Their results go into ``found``, until one is interrupted; returns whether one was."""
    for number, levels in enumerate(zip(*(one.levels() for one in servers), strict=True)):
        for options in levels:
            warm = options if number == 0 else msgspec.structs.replace(options, warmup_requests=0)
            result, is_cut = await _run(warm, arguments)
            if found:
                print()
            if len(servers) > 1 or options.sweep_concurrency or options.sweep_rate:
                print(f"{result['base_url']}, {report.level_name(result)}")
            print(
                report.serve_table(result, options.percentile_metrics, options.metric_percentiles),
                flush=True,
            )
            found.append(result)
            if is_cut:
                return True
    return False


async def _run(options: ServeOptions, arguments: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """One run on one server, and whether it was interrupted, with open requests or without. Raises
    ``TargetError`` and ``BadDataset``."""
    headers = _headers(options)
    target = Target(options.base_url, options.endpoint, headers)
    workload = Workload(options, chat=target.chat)
    named = options.model is not None
    model = _model(options, await target.wait_ready(options.ready_timeout, named=named))
    workload.check_lengths(model.max_model_len)
    version = await target.version()
    await warm_up(options, target, model.id, workload.warmup)
    if options.client_processes > 1:
        target.pool.close()
        run = await run_in_processes(options, headers, model.id, model.max_model_len)
    else:
        sessions = session_plans(options, workload)
        allow_files(min(options.max_concurrency or len(sessions), len(sessions)))
        load = load_of(options, target, model.id, workload, sessions)
        run = await run_here(load, quiet=options.quiet)
    known = {**environment("penstock bench serve", arguments), "server": target.server}
    result = {
        **options.metadata,
        "date": date(),
        "backend": "openai-chat" if target.chat else "openai",
        "base_url": target.url,
        "endpoint": target.endpoint,
        "model_id": model.id,
        **serve_result(options, run, workload),
        "environment": {**known, "server_version": version},
    }
    return result, run.interrupted is not None


def _keep(found: Sequence[dict[str, Any]], path: Path | None, page: Path | None) -> None:
    """The table of several runs, the file and the page. Raises ``OSError`` and ``BadResult``."""
    if len(found) > 1:
        print(f"\n{report.runs_table(found)}")
    if path is not None:
        report.save(found[0] if len(found) == 1 else {"date": date(), "runs": found}, path)
        print(f"\nsaved in {path}")
    if page is not None:
        from penstock.loadtest.reports.html_report import html_report

        check_runs(found, str(page))
        page.write_text(html_report(by_server(found), "Load test"), encoding="utf-8")
        print(f"\nreport in {page}")


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


def _file(options: ServeOptions, name: str | None, ending: str) -> Path | None:
    """Where a file goes; its folder is made and tried before the run. Raises ``OSError``."""
    if name is None:
        return None
    path = Path(options.result_dir) / (name or f"bench-serve-{date()}.{ending}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab"):
        return path
