"""Streams beside long prompts: one engine, two alike, and two that compute prompts and go on apart.

    python -m penstock.loadtest.studies.roles_apart --rounds 4 -- --device cpu

Everything behind ``--`` goes to ``penstock serve``; without a model it is the built-in one. Each
engine has one thread of a CPU, but for the one with two. On GPUs each has one, so give ``--cases``
without the threads. In each round every case has a server of its own,
and the first to run is another one each time. ``--streams`` decode without a pause, while long
prompts come one after another, ``--at-once`` at a time; their answers (``--output``) go on at the
decode engine if they are long enough. Shown are the streams' tokens a second, the median and the
99th percentile of the time between their tokens, and the median time to the first token of the long
prompts; then each case against one engine of its round, as the median of the rounds' ratios with
the least and the most.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from statistics import median
from typing import NamedTuple

from penstock.loadtest.own_server import own_server
from penstock.loadtest.studies.kept_sessions import metric, prompt_of, stream

CASES = {
    "one engine": (),
    "two threads": (),
    "two alike": ("--data-parallel-size", "2"),
    "apart": ("--prefill-engines", "1", "--decode-engines", "1"),
}
SHORT, OUTPUT = 32, 400
"""Tokens of a stream's prompt, and of its answer."""


class Measured(NamedTuple):
    tokens_s: float
    """Of all streams together."""
    itl_ms: float
    itl_p99_ms: float
    ttft_ms: float
    prompts: int
    handed_over: float


class Load:
    """Streams and long prompts, each in a thread."""

    def __init__(self, url: str, tokens: int, output: int, at_once: int) -> None:
        """tokens, output: of a long prompt, and of its answer; at_once: so many of them."""
        self._at_once = at_once
        self._url, self._tokens, self._output = url, tokens, output
        self._over = threading.Event()
        self._counts = False
        self.gaps: list[float] = []
        self.firsts: list[float] = []

    def run(self, streams: int, warm_s: float, seconds: float) -> None:
        threads = [threading.Thread(target=self._stream, args=(each,)) for each in range(streams)]
        threads += [
            threading.Thread(target=self._prompts, args=(each,)) for each in range(self._at_once)
        ]
        for one in threads:
            one.start()
        time.sleep(warm_s)
        self._counts = True
        time.sleep(seconds)
        self._counts = False
        self._over.set()
        for one in threads:
            one.join()

    def _stream(self, number: int) -> None:
        again = 0
        while not self._over.is_set():
            again += 1
            last, prompt = 0.0, prompt_of(SHORT, -1 - number - 1000 * again)
            with closing(stream(self._url, prompt, OUTPUT, ids=True)) as events:
                for at, _ in events:
                    if last and self._counts:
                        self.gaps.append(at - last)
                    last = at
                    if self._over.is_set():
                        return

    def _prompts(self, number: int) -> None:
        seed = number
        while not self._over.is_set():
            seed += self._at_once
            began, first = time.perf_counter(), 0.0
            prompt = prompt_of(self._tokens, seed)
            with closing(stream(self._url, prompt, self._output, ids=True)) as events:
                for at, _ in events:
                    first = first or at - began
                    if self._over.is_set():
                        return
            if self._counts:
                self.firsts.append(first)


def measure(case: str, flags: Sequence[str], asked: argparse.Namespace) -> Measured:
    given = ["--served-model-name", "kept", *flags, *CASES[case]]
    if case == "apart":
        given += ["--kv-tier-memory-bytes", str(asked.tier_bytes)]
    threads = "2" if case == "two threads" else "1"
    environment = {**os.environ, "PENSTOCK_THREADS": threads}
    with own_server(given, environment) as url:
        load = Load(url, asked.tokens, asked.output, asked.at_once)
        load.run(asked.streams, asked.warm, asked.seconds)
        handed = metric(url, "penstock_hand_overs_total")
    gaps = sorted(load.gaps)
    return Measured(
        len(gaps) / asked.seconds,
        1000 * median(gaps),
        1000 * gaps[int(0.99 * len(gaps))],
        1000 * median(load.firsts),
        len(load.firsts),
        handed,
    )


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    own, flags = list(arguments), list[str]()
    if "--" in own:
        at = own.index("--")
        own, flags = own[:at], own[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1800, help="of a long prompt")
    parser.add_argument("--output", type=int, default=16, help="tokens of the answer to one")
    parser.add_argument("--at-once", type=int, default=1, help="long prompts at a time")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--tier-bytes", type=int, default=1 << 30, help="of the keeper's memory")
    parser.add_argument("--warm", type=float, default=4.0, metavar="SECONDS")
    parser.add_argument("--seconds", type=float, default=12.0)
    asked = parser.parse_args(own)
    names = list[str](asked.cases)
    found: dict[str, list[Measured]] = {case: [] for case in names}
    for number in range(asked.rounds):
        for case in names[number % len(names) :] + names[: number % len(names)]:
            one = measure(case, flags, asked)
            found[case].append(one)
            shown = (f"{name}={value:.2f}" for name, value in one._asdict().items())
            print(number, case, *shown, flush=True)
    for case in names:
        for field in ("tokens_s", "itl_ms", "itl_p99_ms", "ttft_ms"):
            pairs = zip(found[case], found[names[0]], strict=True)
            ratios = sorted(getattr(a, field) / getattr(b, field) for a, b in pairs)
            typical = median(getattr(one, field) for one in found[case])
            print(
                f"{case:10} {field:10} {typical:9.2f}  "
                f"{median(ratios):.2f} times {names[0]} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
