"""What a run measured, in numbers. Keys are those of vLLM's ``bench serve`` where it has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.loadtest.client.load import Outcome
from penstock.loadtest.options import Since

Values = np.ndarray[Any, np.dtype[np.float64]]

LATENCIES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token after the first",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
    "queue": "Delay in the client before sending",
}
"""What can be asked for with ``--percentile-metrics``; all are kept in milliseconds."""
EXAMPLES_PER_KIND = 3


def origin(one: Outcome, since: Since) -> float:
    """Seconds of the run's clock from which a request's latencies count."""
    return one.scheduled if since == "intended" else one.started


def latencies(outcomes: Iterable[Outcome], since: Since) -> dict[str, Values]:
    """Milliseconds, by the names of ``LATENCIES``; one value a request, of ``itl`` one a chunk.

    TTFT: from ``since`` (connecting included) to the first chunk with content. ITL: between chunks
    with content. E2EL: from ``since`` to the last chunk with a choice. TPOT:
    ``(e2el - ttft) / (tokens - 1)``, of answers with two tokens or more.
    """
    done = list(outcomes)
    found: dict[str, list[float]] = {name: [] for name in LATENCIES}
    gaps = [np.diff(np.asarray(one.stamps)) for one in done]
    for one in done:
        found["ttft"].append(one.first - origin(one, since))
        found["e2el"].append(one.last - origin(one, since))
        found["queue"].append(one.started - one.scheduled)
        if one.output_len > 1:
            found["tpot"].append((one.last - one.first) / (one.output_len - 1))
    values = {name: np.asarray(list_, dtype=np.float64) * 1e3 for name, list_ in found.items()}
    values["itl"] = np.concatenate(gaps) * 1e3 if gaps else np.empty(0)
    return values


def goodput(
    outcomes: Sequence[Outcome], limits: Mapping[str, float], duration: float, since: Since
) -> float:
    """Requests a second whose every latency in ``limits`` (milliseconds) keeps its limit.

    The ITL of a request is its mean. An answer of one token has no TPOT and no ITL: both are 0.
    """
    good = 0
    for one in outcomes:
        measured = latencies([one], since)
        good += all(
            (measured[name].mean() if measured[name].size else 0.0) <= limit
            for name, limit in limits.items()
        )
    return good / duration


def percentile_name(share: float) -> str:
    return f"p{share:g}"


def spread(values: Values, name: str, percentiles: Sequence[float]) -> dict[str, float]:
    """``mean_ttft_ms``, ``median_…``, ``std_…``, ``p99_…``; zeros where nothing was measured."""
    if not values.size:
        values = np.zeros(1)
    found = {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
    }
    for share in percentiles:
        found[f"{percentile_name(share)}_{name}_ms"] = float(np.percentile(values, share))
    return found


def most_at_once(outcomes: Iterable[Outcome]) -> int:
    """The most requests that were open at the same time."""
    changes = [(o.started, 1) for o in outcomes] + [(o.ended, -1) for o in outcomes]
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def busiest_second(outcomes: Iterable[Outcome], duration: float) -> float:
    """The most output tokens in one second of the run's clock.

    A chunk counts for the same number of tokens as every other of its answer.
    """
    seconds = np.zeros(int(duration) + 1)
    for one in outcomes:
        stamps = np.asarray(one.stamps if one.stamps else [one.last])
        np.add.at(seconds, stamps.astype(np.int64), one.output_len / len(stamps))
    return float(seconds.max())


def summarise(
    outcomes: Sequence[Outcome],
    duration: float,
    *,
    input_lens: Sequence[int | None],
    limits: Mapping[str, float],
    names: Sequence[str],
    percentiles: Sequence[float],
    since: Since = "intended",
) -> dict[str, Any]:
    """All the figures of a run. ``input_lens`` are used where the server sent no usage."""
    done = [one for one in outcomes if one.failure is None]
    duration = max(duration, 1e-9)
    inputs = sum(
        (input_lens[one.index] or 0) if one.prompt_tokens is None else one.prompt_tokens
        for one in done
    )
    outputs = sum(one.output_len for one in done)
    measured = latencies(done, since)
    found: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / duration,
        "request_goodput": goodput(done, limits, duration, since) if limits else None,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
        "max_output_tokens_per_s": busiest_second(done, duration),
        "max_concurrent_requests": most_at_once(outcomes),
    }
    for name in names:
        found |= spread(measured[name], name, percentiles)
    return found


def prefix_hits(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """What the server says that it found in its prefix cache, of the prompts for which it does."""
    told = [o for o in outcomes if o.failure is None and o.cached_tokens is not None]
    cached = sum(one.cached_tokens or 0 for one in told)
    prompts = sum(one.prompt_tokens or 0 for one in told)
    return {
        "total_cached_tokens": cached if told else None,
        "prefix_hit_share": cached / prompts if prompts else None,
    }


def token_counts(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """How the chunks agree with ``usage``."""
    done = [one for one in outcomes if one.failure is None]
    differing = sum(
        one.completion_tokens is not None and one.completion_tokens != len(one.stamps)
        for one in done
    )
    return {
        "chunks": sum(len(one.stamps) for one in done),
        "without_usage": sum(one.completion_tokens is None for one in done),
        "chunks_differ_from_usage": differing,
    }


def failures(outcomes: Iterable[Outcome]) -> dict[str, dict[str, Any]]:
    """Errors by their kind: how many, and a few different messages."""
    failed = [one.failure for one in outcomes if one.failure is not None]
    found: dict[str, dict[str, Any]] = {}
    for kind, count in Counter(f.kind for f in failed).most_common():
        messages = dict.fromkeys(f.message for f in failed if f.kind == kind)
        found[kind] = {"count": count, "examples": list(messages)[:EXAMPLES_PER_KIND]}
    return found


def details(
    outcomes: Iterable[Outcome], input_lens: Sequence[int | None], since: Since = "intended"
) -> dict[str, Any]:
    """Each request on its own, in the order of sending; seconds. A failed one has TTFT 0."""
    ordered = sorted(outcomes, key=lambda one: one.index)
    return {
        "input_lens": [
            input_lens[o.index] if o.prompt_tokens is None else o.prompt_tokens for o in ordered
        ],
        "output_lens": [0 if o.failure else o.output_len for o in ordered],
        "ttfts": [0.0 if o.failure else o.first - origin(o, since) for o in ordered],
        "itls": [[] if o.failure else np.diff(np.asarray(o.stamps)).tolist() for o in ordered],
        "e2els": [0.0 if o.failure else o.last - origin(o, since) for o in ordered],
        "start_times": [o.started for o in ordered],
        "queue_delays": [o.started - o.scheduled for o in ordered],
        "turns": [o.turn for o in ordered],
        "generated_texts": [o.text for o in ordered],
        "errors": [f"{o.failure.kind}: {o.failure.message}" if o.failure else "" for o in ordered],
    }
