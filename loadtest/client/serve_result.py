"""The result of ``bench serve``: figures, counts, the client's own state, and what to beware of."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from penstock.loadtest.client import results
from penstock.loadtest.client.load import Outcome
from penstock.loadtest.client.measured_run import MeasuredRun
from penstock.loadtest.client.serve_options import ServeOptions
from penstock.loadtest.client.time_bins import quantiles, timeline
from penstock.loadtest.client.workload import Workload
from penstock.loadtest.environment import usable_cores
from penstock.loadtest.options import Since

BUSY_SHARE = 0.8
"""If the client uses more than this share of one core, it may itself be what is measured."""
BUSY_SECONDS = 0.5
"""A shorter run says nothing about that."""
LATE_MS = 10.0
LATE_SHARE = 0.1
"""Sending later than this, and than this share of the median TTFT, is noted."""


def serve_result(options: ServeOptions, run: MeasuredRun, workload: Workload) -> dict[str, Any]:
    """Everything measured in a run."""
    outcomes, since = run.outcomes, options.latency_from
    input_lens = workload.source.input_lens
    counts = results.token_counts(outcomes)
    client = {
        "processes": len(run.cpus),
        "cpu_share": max(run.cpus) / run.elapsed,
        "cpu_us_per_chunk": sum(run.cpus) / counts["chunks"] * 1e6 if counts["chunks"] else None,
        "usable_cores": usable_cores(),
    }
    found = {
        **_asked(options, workload),
        **results.summarise(
            outcomes,
            run.duration,
            input_lens=input_lens,
            limits=options.goodput,
            names=options.percentile_metrics,
            percentiles=options.metric_percentiles,
            since=since,
        ),
        **results.prefix_hits(outcomes),
        "goodput_limits_ms": options.goodput,
        "latency_from": since,
        "interrupted": run.interrupted or 0,
        "unsent": run.unsent,
        "token_counts": counts,
        "error_kinds": results.failures(outcomes),
        "client": client,
    }
    found["notes"] = _notes(options, workload, found, run)
    found["timeline"] = timeline(outcomes, run.duration, since)
    found["quantiles"] = quantiles(outcomes, since)
    if options.save_detailed:
        found |= results.details(outcomes, input_lens, since)
    return found


def _asked(options: ServeOptions, workload: Workload) -> dict[str, Any]:
    """What load it was."""
    found: dict[str, Any] = {
        "num_prompts": len(workload.source.output_lens),
        "num_sessions": workload.sessions,
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "dataset_name": options.dataset_name,
        "seed": options.seed,
    }
    names: tuple[str, ...] = ()
    if options.ramp_up_strategy is not None:
        names = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
    elif options.burst_size is not None:
        names = ("burst_size", "burst_interval")
    elif options.dataset_name == "trace":
        names = ("trace_speed",)
    return found | {name: getattr(options, name) for name in names}


def _notes(
    options: ServeOptions, workload: Workload, found: dict[str, Any], run: MeasuredRun
) -> list[str]:
    done = [one for one in run.outcomes if one.failure is None]
    notes = list(workload.notes)
    if run.interrupted is not None:
        notes.append(f"interrupted: the {run.interrupted} open requests are in no figure")
    if run.unsent and run.interrupted is None:
        notes.append(
            f"{run.unsent} of {found['num_prompts']} requests were not sent: the time was over "
            "(--max-seconds), or an earlier turn of their conversation had failed"
        )
    notes.extend(_about_tokens(options, done, workload, found["token_counts"]))
    if found["client"]["cpu_share"] > BUSY_SHARE and found["duration"] > BUSY_SECONDS:
        notes.append(
            f"this client used {found['client']['cpu_share']:.0%} of one core: the latencies may "
            "be its own; give it --client-processes, run it on another machine or lower the load"
        )
    notes.extend(_about_lateness(done, options.latency_from))
    return notes


def _about_tokens(
    options: ServeOptions, done: list[Outcome], workload: Workload, counts: dict[str, int]
) -> list[str]:
    notes = []
    if counts["without_usage"]:
        notes.append(
            f"{counts['without_usage']} answers had no usage: their chunks are counted as tokens"
        )
    if counts["chunks_differ_from_usage"]:
        tokens = sum(one.output_len for one in done)
        notes.append(
            f"{counts['chunks_differ_from_usage']} answers had another number of chunks than of "
            f"tokens (in all {counts['chunks']} chunks, {tokens} tokens): ITL is between chunks"
        )
    asked = workload.source.output_lens
    early = sum(one.output_len < asked[one.index] for one in done)
    if early and options.sampling.get("ignore_eos"):
        notes.append(f"{early} answers were shorter than asked for in spite of --ignore-eos")
    elif early and options.dataset_name not in ("sharegpt", "jsonl"):
        notes.append(
            f"{early} answers were shorter than asked for; --ignore-eos makes them all as long"
        )
    return notes


def _about_lateness(done: list[Outcome], since: Since) -> list[str]:
    """Coordinated omission: what TTFT is with and without the waiting in this client."""
    if not done:
        return []
    late = np.asarray([one.started - one.scheduled for one in done]) * 1e3
    ttft = np.asarray([one.first - one.started for one in done]) * 1e3
    worst = float(np.percentile(late, 99))
    if worst < LATE_MS or worst < LATE_SHARE * float(np.median(ttft)):
        return []
    told = f"requests were sent up to {worst:.0f} ms (p99) later than scheduled"
    if since == "intended":
        return [f"{told}, which TTFT and E2EL include; {_ttft(ttft)} from sending"]
    return [f"{told}; counted from then, {_ttft(late + ttft)}"]


def _ttft(values: results.Values) -> str:
    return (
        f"TTFT is {np.median(values):.0f} ms (median) and {np.percentile(values, 99):.0f} ms (p99)"
    )
