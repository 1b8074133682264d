"""Texts a second of /v1/embeddings beside sentence-transformers, in turns on the same machine.

    python -m penstock.loadtest.studies.embedding_rates FOLDER [--device cuda] [--clients N …]

It needs the package sentence-transformers. Each round encodes the same texts of 4 to 60 words, in
batches of 1, 8 and 64, first by the one, then by the other; the best round of each counts. The
server is asked by ``--clients`` at once, each with a batch of its own, for each of these numbers;
the library has one caller.
Of the server it is said which of its processes the processor time goes to.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import random
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import psutil

from penstock.loadtest.process_cpu import cpu_of, service_of

BATCHES = (1, 8, 64)
SETTLE_SECONDS = 10.0
"""All processes of the server start at once, and its worker measures threads again after that. In
the other's turns the server is idle too, but the cores are not."""
WORDS = ("water", "weir", "sluice", "river", "mill", "gate", "stone", "turbine", "valley", "rain")
Vectors = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Encode = Callable[[Sequence[str]], Vectors]


def texts(count: int) -> list[str]:
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=rng.randint(4, 60))) for _ in range(count)]


class Rate(NamedTuple):
    texts_a_second: float
    cpu_ms: Mapping[str, float]
    """Processor time for a text, of all threads of each service; unlike the rate it says the same
    on a machine that others use too."""

    @property
    def cpu_ms_a_text(self) -> float:
        return sum(self.cpu_ms.values())


def rate(
    encodes: Sequence[Encode], batch: int, seconds: float, cpu: Callable[[], Mapping[str, float]]
) -> Rate:
    """Of about so many seconds, all ``encodes`` at once. cpu: seconds of processor time so far, by
    service."""
    given, done = texts(256), [0] * len(encodes)
    began, before = time.perf_counter(), cpu()

    def ask(number: int) -> None:
        while time.perf_counter() - began < seconds:
            first = (number * batch + done[number]) % (len(given) - batch + 1)
            encodes[number](given[first : first + batch])
            done[number] += batch

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(encodes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    passed, count = time.perf_counter() - began, sum(done)
    used = {name: 1000 * (now - before[name]) / count for name, now in cpu().items()}
    return Rate(count / passed, used)


def over_http(url: str) -> Encode:
    connection = http.client.HTTPConnection(url.removeprefix("http://"))

    def encode(given: Sequence[str]) -> Vectors:
        body = json.dumps({"input": list(given), "encoding_format": "base64"})
        connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
        answer: Any = json.load(connection.getresponse())
        rows = [base64.b64decode(one["embedding"]) for one in answer["data"]]
        return np.array([np.frombuffer(row, "<f4") for row in rows])

    return encode


def told(rates: Sequence[Rate], other: float) -> str:
    """The best of some rounds, beside so many texts a second of another, and what texts cost in the
    cheapest round."""
    best = max(one.texts_a_second for one in rates)
    least = min(rates, key=lambda one: one.cpu_ms_a_text)
    parts = [f"{service} {ms:.3f}" for service, ms in least.cpu_ms.items() if service]
    return (
        f"{best:.0f} texts a second ({best / other:.2f}), "
        f"{least.cpu_ms_a_text:.2f} CPU ms each {', '.join(parts)}".rstrip()
    )


def _compare(
    options: argparse.Namespace,
    clients: Sequence[Encode],
    library: Encode,
    of_server: Callable[[], Mapping[str, float]],
) -> None:
    """Rounds in turns, and a line for each size of batch and number of clients."""
    for batch in options.batches:
        rates = defaultdict[str, list[Rate]](list)
        for _ in range(options.rounds):
            for count in options.clients:
                found = rate(clients[:count], batch, options.seconds, of_server)
                rates[f"penstock, {count} at once"].append(found)
            rates["sentence-transformers"].append(
                rate([library], batch, options.seconds, lambda: {"": time.process_time()})
            )
        other = max(one.texts_a_second for one in rates["sentence-transformers"])
        for name, of in rates.items():
            print(f"batch {batch}: {name}: {told(of, other)}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder")
    parser.add_argument(
        "--threads", type=int, help="of torch, for either (default: as either chooses)"
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="for either")
    parser.add_argument(
        "--clients", type=int, nargs="+", default=[1], help="of the server, at once"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="texts in each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    theirs = import_module("sentence_transformers").SentenceTransformer(
        options.folder, device=options.device
    )
    command = [sys.executable, "-m", "penstock.services", "serve", options.folder, "--port", "0"]
    command += ["--device", options.device]
    command += ["--threads", str(options.threads)] if options.threads else []
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        if server.stdout is None:
            raise RuntimeError("no standard output")
        address = next(filter(None, (re.search(r"http://[\d.]+:\d+", x) for x in server.stdout)))
        clients = [over_http(address[0]) for _ in range(max(options.clients))]
        while True:
            try:
                urllib.request.urlopen(address[0] + "/ready")
                break
            except OSError:
                time.sleep(0.2)

        def library(given: Sequence[str]) -> Vectors:
            vectors: Vectors = theirs.encode(list(given), batch_size=64, show_progress_bar=False)
            return vectors

        root = psutil.Process(server.pid)
        processes = {one: service_of(one) for one in (root, *root.children(recursive=True))}

        def of_server() -> Mapping[str, float]:
            return cpu_of(processes)

        apart = np.abs(clients[0](texts(256)) - library(texts(256))).max()
        print(f"largest difference over 256 texts: {apart:.2g}")
        time.sleep(SETTLE_SECONDS)
        _compare(options, clients, library, of_server)
    finally:
        server.terminate()
        server.wait(30)
    return 0


if __name__ == "__main__":
    sys.exit(main())
