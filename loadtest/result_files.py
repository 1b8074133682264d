"""Result files of ``bench serve``, and of vLLM's tool, as a report reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

NEEDED = ("duration", "completed", "request_throughput", "output_throughput")
Run = dict[str, Any]


class BadResult(ValueError):
    """A file that is no result. The message names it."""


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
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadResult(f"{path}: no result file: {error}") from None
    runs = read.get("runs", [read]) if isinstance(read, dict) else read
    if not isinstance(runs, list) or not runs:
        raise BadResult(f"{path}: it holds no runs")
    for run in runs:
        lacking = [n for n in NEEDED if not isinstance(run, dict) or not _is_number(run.get(n))]
        if lacking:
            raise BadResult(
                f"{path}: no result of `penstock bench serve`: without {', '.join(lacking)}"
            )
    return runs


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _different(names: Sequence[str]) -> list[str]:
    """The names, with numbers where two are the same."""
    if len(set(names)) < len(names):
        return [f"{name} ({number})" for number, name in enumerate(names, start=1)]
    return list(names)
