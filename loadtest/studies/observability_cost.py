"""What metrics, request logs and traces cost, with the null device in place of a model.

    python -m penstock.loadtest.studies.observability_cost
    python -m penstock.loadtest.studies.observability_cost --tokens 128 --ways nothing traces

Servers that differ in one thing take turns: nothing (no metric is counted, none is reported, no
request is logged), counted (metrics, as ever; no request is logged), watched (as by default: a log
line for each request, written to a pipe that is read; ``/metrics`` scraped every 5 s), traces (as
watched, and all requests traced, to a collector on this machine), sampled (a share of them). Each
figure is compared with the first server's in the same round.

CPU for a request is that of all processes of the server, from /proc, exports of spans included; it
hardly depends on what else the machine does. Throughput does, and the client and the collector have
their share of it where there are few cores. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

from penstock.loadtest.options import integer, number
from penstock.loadtest.own_server import own_server
from penstock.loadtest.process_cpu import service_of
from penstock.loadtest.studies import uncounted
from penstock.loadtest.studies.pipeline_cost import cpu_seconds, stream
from penstock.loadtest.studies.span_receiver import span_receiver, spans_since

WAYS = ("nothing", "counted", "watched", "sampled", "traces")
SCRAPE_S = 5.0
EXPORT_S = 1.0
"""Spans are exported so often at least; the standard's five seconds would make rounds longer."""
WARM_REQUESTS = 200


class Measured(NamedTuple):
    """One turn of a server."""

    cpu_us: Mapping[str, float]
    """A request's, by service."""
    requests_a_second: float
    spans: float
    """That have come of a request."""


class Subject:
    """A server that can be watched in one way."""

    def __init__(self, way: str, url: str, collector: str, processes: Sequence[psutil.Process]):
        parts = urlsplit(url)
        self.way, self._url, self._collector = way, url, collector
        self._address = str(parts.hostname), int(parts.port or 0)
        self._services = {one.pid: service_of(one) for one in processes}

    def _cpu(self) -> dict[str, float]:
        found = defaultdict[str, float](float)
        for pid, service in self._services.items():
            found[service] += cpu_seconds(pid)
        return found

    def put(self, requests: int, tokens: int, streams: int) -> Measured:
        """That many requests, ``streams`` of them at once, each of ``tokens`` of output."""
        spans_since(self._collector)
        before, began = self._cpu(), time.perf_counter()
        with self._scraped():
            asyncio.run(self._ask(requests, tokens, streams))
        seconds = time.perf_counter() - began
        time.sleep(EXPORT_S + 0.5)  # the last spans are exported, and all servers idle as long
        after = self._cpu()
        return Measured(
            {name: (after[name] - before[name]) / requests * 1e6 for name in after},
            requests / seconds,
            spans_since(self._collector) / requests,
        )

    async def _ask(self, requests: int, tokens: int, streams: int) -> None:
        places = iter(range(requests))

        async def client() -> None:
            for place in places:
                prompt = f"request {place}: " + "what is a penstock? " * 8
                found = await stream(self._address, prompt, tokens, "chat")
                if not found.events:
                    raise RuntimeError(f"{self.way}: a request got no answer")

        await asyncio.gather(*(client() for _ in range(streams)))

    @contextlib.contextmanager
    def _scraped(self) -> Iterator[None]:
        """``/metrics`` is asked for every ``SCRAPE_S``, where this server is watched."""
        ended = threading.Event()

        def scrape() -> None:
            while not ended.wait(SCRAPE_S):
                with urllib.request.urlopen(f"{self._url}/metrics", timeout=60) as answer:
                    answer.read()

        thread = threading.Thread(target=scrape, daemon=True)
        if self.way not in ("nothing", "counted"):
            thread.start()
        try:
            yield
        finally:
            ended.set()
            if thread.is_alive():
                thread.join()


@contextlib.contextmanager
def _subject(way: str, collector: str, options: argparse.Namespace) -> Iterator[Subject]:
    flags = ["--device", "null", "--null-step-ms", str(options.step_ms), "--max-num-seqs", "256"]
    flags += ["--log-level", "warning" if way in ("nothing", "counted") else "info"]
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if way == "nothing":
            environment = dict(uncounted.environment(Path(folder)))
        if way in ("sampled", "traces"):
            flags.append("--otel-traces")
            ratio = options.ratio if way == "sampled" else 1.0
            environment |= {
                "OTEL_EXPORTER_OTLP_ENDPOINT": collector,
                "OTEL_BSP_SCHEDULE_DELAY": str(int(1000 * EXPORT_S)),
                "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
                "OTEL_TRACES_SAMPLER_ARG": str(ratio),
            }
        others = set(psutil.Process().children())
        url = stack.enter_context(own_server(flags, environment))
        (root,) = set(psutil.Process().children()) - others
        yield Subject(way, url, collector, [root, *root.children(recursive=True)])


def _spread(values: Sequence[float], unit: str = "") -> str:
    """Median, and where the middle half lies."""
    if len(values) < 2:
        return f"{values[0]:.4g}{unit}"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.4g}{unit} ({low:.4g} to {high:.4g})"


def _tell(tokens: int, found: Mapping[str, Sequence[Measured]]) -> None:
    """A line for each way, of all rounds so far."""
    base = next(iter(found.values()))
    for way, turns in found.items():
        sums = [sum(one.cpu_us.values()) for one in turns]
        pairs = list(zip(turns, base, strict=False))
        more = [100 * (sum(a.cpu_us.values()) / sum(b.cpu_us.values()) - 1) for a, b in pairs]
        rates = [100 * (a.requests_a_second / b.requests_a_second - 1) for a, b in pairs]
        services = {
            name: round(statistics.median(one.cpu_us[name] for one in turns), 1)
            for name in turns[0].cpu_us
        }
        line = {
            "tokens": tokens, "way": way, "rounds": len(turns),
            "cpu_us_a_request": _spread(sums), "more_cpu": _spread(more, " %"),
            "requests_a_second": round(statistics.median(x.requests_a_second for x in turns), 1),
            "more_requests": _spread(rates, " %"),
            "spans": round(statistics.median(one.spans for one in turns), 2), "cpu_us": services,
        }  # fmt: skip
        print(json.dumps(line), flush=True)


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    found: dict[int, dict[str, list[Measured]]] = {
        tokens: {way: [] for way in options.ways} for tokens in options.tokens
    }
    with span_receiver() as collector:
        for _ in range(options.starts):
            with contextlib.ExitStack() as stack:
                subjects = [
                    stack.enter_context(_subject(way, collector, options)) for way in options.ways
                ]
                for subject in subjects:
                    subject.put(WARM_REQUESTS, 16, options.streams)
                for turn in range(options.rounds):
                    # Whoever comes first in one round comes last in the next.
                    for subject in subjects if turn % 2 else reversed(subjects):
                        for tokens in options.tokens:
                            requests = max(options.streams, options.tokens_a_turn // (tokens + 32))
                            one = subject.put(requests, tokens, options.streams)
                            found[tokens][subject.way].append(one)
            for tokens, of in found.items():
                _tell(tokens, of)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.partition("\n")[0])
    parser.add_argument(
        "--ways", choices=WAYS, nargs="+", default=list(WAYS),
        help="how servers are watched; all are compared with the first one",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=integer(1, 100_000), nargs="+", default=[16, 128, 512], metavar="N",
        help="of output, of a request",
    )  # fmt: skip
    parser.add_argument(
        "--tokens-a-turn", type=integer(1, 10**9), default=100_000, metavar="N",
        help="of a server's turn, about",
    )  # fmt: skip
    parser.add_argument("--streams", type=integer(1, 10_000), default=64, metavar="N")
    parser.add_argument("--step-ms", type=number(0, 1000), default=0.0, metavar="X")
    parser.add_argument("--ratio", type=number(0, 1), default=0.1, metavar="X")
    parser.add_argument("--rounds", type=integer(1, 1000), default=8, metavar="N")
    parser.add_argument(
        "--starts", type=integer(1, 1000), default=3, metavar="N",
        help="servers are started anew so often, each time for that many rounds",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
