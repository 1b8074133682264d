"""The result of ``bench serve``: figures, counts, the client's own state, and what to beware of."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from penstock.loadtest import results
from penstock.loadtest.environment import usable_cores
from penstock.loadtest.load import Load, Outcome
from penstock.loadtest.serve_options import ServeOptions
from penstock.loadtest.workload import Workload

BUSY_SHARE = 0.8
"""If the client uses more than this share of one core, it may itself be what is measured."""
BUSY_SECONDS = 0.5
"""A shorter run says nothing about that."""
LATE_MS = 10.0
LATE_SHARE = 0.1
"""Sending later than this, and than this share of the median TTFT, is noted."""


def serve_result(
    options: ServeOptions, load: Load, workload: Workload, *, cpu: float, interrupted: int | None
) -> dict[str, Any]:
    """Everything measured in a run. ``cpu``: seconds that this process used in it."""
    outcomes = load.outcomes
    input_lens = [prompt.input_len for prompt in workload.prompts]
    elapsed = max(load.elapsed(), 1e-9)
    counts = results.token_counts(outcomes)
    client = {
        "cpu_share": cpu / elapsed,
        "cpu_us_per_chunk": cpu / counts["chunks"] * 1e6 if counts["chunks"] else None,
        "usable_cores": usable_cores(),
    }
    found = {
        "num_prompts": options.num_prompts,
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "dataset_name": options.dataset_name,
        "seed": options.seed,
        **results.summarise(
            outcomes,
            load.duration,
            input_lens=input_lens,
            limits=options.goodput,
            names=options.percentile_metrics,
            percentiles=options.metric_percentiles,
        ),
        "goodput_limits_ms": options.goodput,
        "interrupted": interrupted or 0,
        "token_counts": counts,
        "error_kinds": results.failures(outcomes),
        "client": client,
    }
    found["notes"] = _notes(options, outcomes, workload, found, interrupted)
    if options.save_detailed:
        found |= results.details(outcomes, input_lens)
    return found


def _notes(
    options: ServeOptions,
    outcomes: list[Outcome],
    workload: Workload,
    found: dict[str, Any],
    interrupted: int | None,
) -> list[str]:
    done = [one for one in outcomes if one.failure is None]
    notes = [workload.note] if workload.note else []
    if interrupted is not None:
        notes.append(f"interrupted: the {interrupted} open requests are in no figure")
    notes.extend(_about_tokens(options, done, workload, found["token_counts"]))
    if found["client"]["cpu_share"] > BUSY_SHARE and found["duration"] > BUSY_SECONDS:
        notes.append(
            f"this client used {found['client']['cpu_share']:.0%} of one core: the latencies may "
            "be its own; run it on another machine or lower the load"
        )
    notes.extend(_about_lateness(done))
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
    asked = workload.prompts
    early = sum(one.output_len < asked[one.index].output_len for one in done)
    if early and options.sampling.get("ignore_eos"):
        notes.append(f"{early} answers were shorter than asked for in spite of --ignore-eos")
    elif early and options.dataset_name == "random":
        notes.append(
            f"{early} answers were shorter than asked for; --ignore-eos makes them all as long"
        )
    return notes


def _about_lateness(done: list[Outcome]) -> list[str]:
    """Coordinated omission: what TTFT would be if waiting in this client counted."""
    if not done:
        return []
    late = np.asarray([one.started - one.scheduled for one in done]) * 1e3
    ttft = np.asarray([one.first - one.started for one in done]) * 1e3
    worst = float(np.percentile(late, 99))
    if worst < LATE_MS or worst < LATE_SHARE * float(np.median(ttft)):
        return []
    total = late + ttft
    return [
        f"requests were sent up to {worst:.0f} ms (p99) later than scheduled; counted from then, "
        f"TTFT is {np.median(total):.0f} ms (median) and {np.percentile(total, 99):.0f} ms (p99)"
    ]
