"""Result files of ``bench serve``, and of vLLM's tool, as a report reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

Run = dict[str, Any]


class BadResult(ValueError):
    """A file that is no result. The message names it."""


class ErrorKind(msgspec.Struct):
    count: int
    examples: list[str]


class Timeline(msgspec.Struct):
    """See ``time_bins.timeline``."""

    bin_s: Annotated[float, msgspec.Meta(gt=0)]
    arrived: list[float]
    completed: list[float]
    failed: list[float]
    open: list[float]
    output_tokens_per_s: list[float]
    median_ttft_ms: list[float | None]
    p99_ttft_ms: list[float | None]


class Quantiles(msgspec.Struct):
    """See ``time_bins.quantiles``."""

    shares: list[float]
    ttft: list[float] = []
    tpot: list[float] = []
    e2el: list[float] = []

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot", "e2el"):
            found = getattr(self, name)
            if found and len(found) != len(self.shares):
                raise ValueError(f"{name}: {len(found)} values for {len(self.shares)} shares")


class ReadRun(msgspec.Struct):
    """What a page computes with, of one run, and of what types. Other fields are shown as text."""

    duration: float
    completed: float
    request_throughput: float
    output_throughput: float
    failed: float | None = None
    median_ttft_ms: float | None = None
    p99_ttft_ms: float | None = None
    median_tpot_ms: float | None = None
    p99_tpot_ms: float | None = None
    median_itl_ms: float | None = None
    p99_itl_ms: float | None = None
    median_e2el_ms: float | None = None
    p99_e2el_ms: float | None = None
    request_goodput: float | None = None
    prefix_hit_share: float | None = None
    max_concurrent_requests: float | None = None
    max_concurrency: int | None = None
    request_rate: float | Literal["inf"] | None = None
    ramp_up_strategy: str | None = None
    ramp_up_start_rps: float | None = None
    ramp_up_end_rps: float | None = None
    burst_size: int | None = None
    burst_interval: float | None = None
    trace_speed: float = 1.0
    notes: list[str] = []
    error_kinds: dict[str, ErrorKind] = {}
    client: dict[str, Any] = {}
    environment: dict[str, Any] = {}
    timeline: Timeline | None = None
    quantiles: Quantiles | None = None

    def __post_init__(self) -> None:
        if self.ramp_up_strategy and None in (self.ramp_up_start_rps, self.ramp_up_end_rps):
            raise ValueError("ramp_up_strategy needs ramp_up_start_rps and ramp_up_end_rps")
        if self.burst_size and self.burst_interval is None:
            raise ValueError("burst_size needs burst_interval")


class Series(msgspec.Struct):
    """The runs of one server or of one file, by their load."""

    label: str
    runs: list[Run]


def read_results(paths: Sequence[str], labels: Sequence[str] = ()) -> list[Series]:
    """A series for each file, or for each server where a file has several. labels: of the files, in
    their order; otherwise their names. Raises ``BadResult``."""
    found: list[Series] = []
    names = [*labels, *_different([Path(path).stem for path in paths])[len(labels) :]]
    for path, name in zip(paths, names, strict=True):
        servers = by_server(_runs(path))
        for series in servers:
            if len(paths) == 1 and not labels:
                found.append(series)
            elif len(servers) == 1:
                found.append(Series(name, series.runs))
            else:
                found.append(Series(f"{name}: {series.label}", series.runs))
    return found


def by_server(runs: Sequence[Run]) -> list[Series]:
    """A series for each server and model."""
    found: dict[str, Series] = {}
    for run in runs:
        label = str(run.get("base_url") or run.get("model_id") or "server")
        found.setdefault(label, Series(label, [])).runs.append(run)
    return list(found.values())


def _runs(path: str) -> list[Run]:
    try:
        read = msgspec.json.decode(Path(path).read_bytes())
    except OSError as error:
        raise BadResult(f"{path}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadResult(f"{path}: no result file: {error}") from None
    runs = read.get("runs", [read]) if isinstance(read, dict) else read
    if not isinstance(runs, list) or not runs:
        raise BadResult(f"{path}: it holds no runs")
    check_runs(runs, path)
    return runs


def check_runs(runs: Sequence[Any], place: str) -> None:
    """Whether a page can be made of them. place: where they stand, for the error. Raises
    ``BadResult``."""
    for number, run in enumerate(runs, start=1):
        try:
            msgspec.convert(run, ReadRun)
        except msgspec.ValidationError as error:
            which = f", run {number}" if len(runs) > 1 else ""
            raise BadResult(
                f"{place}{which}: no result of `penstock bench serve`: {error}"
            ) from None


def _different(names: Sequence[str]) -> list[str]:
    """The names, with numbers where two are the same."""
    if len(set(names)) < len(names):
        return [f"{name} ({number})" for number, name in enumerate(names, start=1)]
    return list(names)
