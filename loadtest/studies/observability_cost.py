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
import random
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
        self._before: Mapping[str, float] = {}
        self._rate = 0.0

    def _cpu(self) -> dict[str, float]:
        found = defaultdict[str, float](float)
        for pid, service in self._services.items():
            found[service] += cpu_seconds(pid)
        return found

    def put(self, requests: int, tokens: int, streams: int) -> None:
        """That many requests, ``streams`` of them at once, each of ``tokens`` of output."""
        began = time.perf_counter()
        with self._scraped():
            asyncio.run(self._ask(requests, tokens, streams))
        self._rate = requests / (time.perf_counter() - began)

    def begin(self) -> None:
        """A round begins."""
        self._before = self._cpu()
        spans_since(self._collector)

    def measured(self, requests: int) -> Measured:
        """The round is over, in which it was put under one load."""
        used = {name: after - self._before[name] for name, after in self._cpu().items()}
        return Measured(
            {name: seconds / requests * 1e6 for name, seconds in used.items()},
            self._rate,
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
def _subject(way: str, options: argparse.Namespace) -> Iterator[Subject]:
    flags = ["--device", "null", "--null-step-ms", str(options.step_ms), "--max-num-seqs", "256"]
    flags += ["--log-level", "warning" if way in ("nothing", "counted") else "info"]
    environment = dict(os.environ)
    with (
        tempfile.TemporaryDirectory() as folder,
        span_receiver() as collector,
        contextlib.ExitStack() as stack,
    ):
        if way == "nothing":
            environment = dict(uncounted.environment(Path(folder)))
        if way in ("sampled", "traces"):
            flags.append("--otel-traces")
            ratio = options.ratio if way == "sampled" else 1.0
            environment |= {
                "OTEL_EXPORTER_OTLP_ENDPOINT": collector,
                "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
                "OTEL_TRACES_SAMPLER_ARG": str(ratio),
            }
        others = set(psutil.Process().children())
        url = stack.enter_context(own_server(flags, environment))
        (root,) = set(psutil.Process().children()) - others
        yield Subject(way, url, collector, [root, *root.children(recursive=True)])


def _spread(values: Sequence[float]) -> str:
    """Median, and where the middle half lies."""
    if len(values) < 2:
        return f"{values[0]:.4g}"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.4g} ({low:.4g} to {high:.4g})"


def _more(values: Sequence[float], base: Sequence[float]) -> str:
    """By how many per cent the lower quartile of the first is above that of the other, and where
    nine tenths of what follows from rounds drawn anew (with replacement) lie."""
    draw, rounds = random.Random(0), range(len(base))

    def ratio(chosen: Sequence[int]) -> float:
        of, to = ([all_of[place] for place in chosen] for all_of in (values, base))
        return 100 * (_low(of) / _low(to) - 1)

    drawn = sorted(ratio(draw.choices(rounds, k=len(base))) for _ in range(1000))
    return f"{ratio(rounds):+.1f} % ({drawn[50]:+.1f} to {drawn[-51]:+.1f})"


def _low(values: Sequence[float]) -> float:
    """The lower quartile: what else a machine does only adds to what a request takes."""
    return sorted(values)[len(values) // 4]


def _tell(tokens: int, found: Mapping[str, Sequence[Measured]]) -> None:
    """A line for each way, of all rounds so far."""
    base = next(iter(found.values()))
    for way, turns in found.items():
        sums, base_sums = (
            [sum(one.cpu_us.values()) for one in measured] for measured in (turns, base)
        )
        seconds, base_seconds = (
            [1 / one.requests_a_second for one in measured] for measured in (turns, base)
        )
        services = {
            name: round(statistics.median(one.cpu_us[name] for one in turns), 1)
            for name in turns[0].cpu_us
        }
        line = {
            "tokens": tokens, "way": way, "rounds": len(turns),
            "cpu_us_a_request": _spread(sums), "more_cpu": _more(sums, base_sums),
            "requests_a_second": _spread([x.requests_a_second for x in turns]),
            "more_seconds": _more(seconds, base_seconds),
            "spans": round(statistics.median(one.spans for one in turns), 2), "cpu_us": services,
        }  # fmt: skip
        print(json.dumps(line), flush=True)


def _round(
    subjects: Sequence[Subject], turn: int, requests: int, tokens: int, streams: int
) -> dict[str, Measured]:
    """Each server has one load, and then idles while the others have theirs; so it exports its last
    spans beside them, and all are measured for as long."""
    for subject in subjects:
        subject.begin()
    first = turn % len(subjects)
    for subject in (*subjects[first:], *subjects[:first]):
        subject.put(requests, tokens, streams)
    return {one.way: one.measured(requests) for one in subjects}


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    found: dict[int, dict[str, list[Measured]]] = {
        tokens: {way: [] for way in options.ways} for tokens in options.tokens
    }
    for _ in range(options.starts):
        with contextlib.ExitStack() as stack:
            subjects = [stack.enter_context(_subject(way, options)) for way in options.ways]
            for subject in subjects:
                subject.put(WARM_REQUESTS, 16, options.streams)
            for tokens, of in found.items():
                waves = max(1, options.tokens_a_turn // (tokens + 32) // options.streams)
                requests = waves * options.streams
                for turn in range(options.rounds):
                    one = _round(subjects, turn, requests, tokens, options.streams)
                    for way, measured in one.items():
                        of[way].append(measured)
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
