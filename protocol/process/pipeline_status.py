"""The state of a whole server in a few numbers, from its members and their counters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.protocol.process.metric_declarations import METRICS
from penstock.protocol.process.metrics import merge
from penstock.protocol.wire.messages.membership import MetricsAnswer, MetricsReport, Peer

PIPELINE = ("frontend", "tokenizer", "router", "scheduler", "worker")
"""The services in the order of a request's way."""
_WAITING_HOPS = ("router", "tokenizer", "scheduler")
"""Where requests wait; those at hop ``frontend`` are all that are open."""


def _sum(report: MetricsReport, name: str, *labels: str) -> int:
    """A counter or gauge without fraction, over all labels behind these; 0 where nobody has
    reported it."""
    wanted = list(labels)
    found = (s for s in report.samples if s.name == name)
    return sum(int(s.values[0]) for s in found if s.labels[: len(wanted)] == wanted)


def _living(answer: MetricsAnswer) -> dict[int, MetricsReport]:
    return {one.incarnation: one.report for one in answer.processes if one.incarnation}


def _engine_facts(report: MetricsReport) -> dict[str, list[str]]:
    """The devices and dtypes of the living workers, each once."""
    known = [sample.labels for sample in report.samples if sample.name == "engine_info"]
    devices, dtypes = ({labels[place] for labels in known} - {""} for place in (0, 1))
    return {"devices": sorted(devices), "dtypes": sorted(dtypes)}


def _load(peer: Peer, report: MetricsReport | None) -> int:
    """Requests in the process. From its counters: the membership tells of a load only when
    something else changes."""
    if report is None:
        return 0
    if peer.service == "scheduler":
        return _sum(report, "requests_running") + _sum(report, "requests_waiting")
    return _sum(report, "queue_depth", peer.service)


def _process(peer: Peer, report: MetricsReport | None) -> dict[str, Any]:
    return {
        "service": peer.service,
        "pid": peer.identity.pid,
        "host": peer.identity.host,
        "engine": peer.identity.engine,
        "rank": peer.identity.rank,
        "phase": peer.phase,
        "note": peer.note,
        "load": _load(peer, report),
        **({"role": peer.identity.role} if peer.identity.role != "both" else {}),
    }


def _spread(report: MetricsReport, name: str) -> dict[str, float]:
    """Median and 99th percentile of all observations so far, and how many they are."""
    for sample in report.samples:
        if sample.name == name and any(sample.values[:-1]):
            counts = sample.values[:-1]
            bounds = METRICS[name].buckets
            return {
                "p50": _quantile(counts, bounds, 0.5),
                "p99": _quantile(counts, bounds, 0.99),
                "count": sum(counts),
            }
    return {}


def _quantile(counts: Sequence[float], bounds: Sequence[float], share: float) -> float:
    """As Prometheus' ``histogram_quantile``: even within a bucket, and the highest bound for what
    lies above it."""
    wanted, below = share * sum(counts), 0.0
    for place, (count, bound) in enumerate(zip(counts, bounds, strict=False)):
        if count and below + count >= wanted:
            low = bounds[place - 1] if place else 0.0
            return round(low + (bound - low) * (wanted - below) / count, 6)
        below += count
    return bounds[-1]


def _place(peer: Peer) -> tuple[int, str, int, int]:
    order = PIPELINE.index(peer.service) if peer.service in PIPELINE else len(PIPELINE)
    return order, peer.identity.engine, peer.identity.rank, peer.identity.pid


def pipeline_status(answer: MetricsAnswer, members: list[Peer]) -> dict[str, Any]:
    """The pipeline as the playground's panel and ``penstock status`` show it.

    Counters include the dead processes' share, so they never fall while a router lives; gauges
    are the living ones' only. Values are as old as the newest beats (half a second).
    """
    everyone = merge(one.report for one in answer.processes)
    living = _living(answer)
    now = merge(living.values())
    return {
        **_engine_facts(now),
        "running": _sum(now, "requests_running"),
        "waiting": sum(_sum(now, "queue_depth", hop) for hop in _WAITING_HOPS),
        "queue_depth": {hop: _sum(now, "queue_depth", hop) for hop in PIPELINE[:-1]},
        "kv_blocks_used": _sum(now, "kv_blocks_used"),
        "kv_blocks_total": _sum(now, "kv_blocks"),
        "prefix_cache_query_tokens": _sum(everyone, "prefix_cache_query_tokens_total"),
        "prefix_cache_hit_tokens": _sum(everyone, "prefix_cache_hit_tokens_total"),
        "prompt_tokens": _sum(everyone, "prompt_tokens_total"),
        "generation_tokens": _sum(everyone, "generation_tokens_total"),
        "requests_finished": {
            sample.labels[0]: int(sample.values[0])
            for sample in everyone.samples
            if sample.name == "requests_finished_total"
        },
        "time_to_first_token_s": _spread(everyone, "time_to_first_token_seconds"),
        "inter_token_latency_s": _spread(everyone, "inter_token_latency_seconds"),
        "processes": [
            _process(peer, living.get(peer.incarnation)) for peer in sorted(members, key=_place)
        ],
    }
