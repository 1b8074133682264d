"""Requests per second and time to the first token over HTTP, beside `transformers serve`.

    python -m penstock.loadtest.studies.compare_cpu_http \\
        --transformers-python ENVIRONMENT/bin/python
    python -m penstock.loadtest.studies.compare_cpu_http \\
        --transformers-python … --model 0.6b --clients 8

That environment needs `transformers[serving]` and torch; it may be this one. Both serve the same
random checkpoint with continuous batching, greedily, streamed, and `penstock bench serve` is the
client of both. `transformers serve` knows no ``ignore_eos``, so the checkpoint has no end token;
the run fails if an answer is shorter than asked for. It runs with each number of threads of
``--transformers-threads`` and the better one counts. Each round measures all servers one after the
other; those that wait are stopped (Penstock is not: its processes watch each other). The ratio is
taken round by round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from penstock.loadtest.models.make_model import make_model
from penstock.loadtest.models.model_sizes import SIZES
from penstock.loadtest.own_server import own_server
from penstock.loadtest.studies.compare_cpu import PROMPT
from penstock.loadtest.studies.foreign.compare import words_for

START_S = 120.0
END_S = 30.0
KV_SHARE = 0.15
"""The share of the machine's memory that each `transformers serve` may take for KV memory. It
touches all that it takes, and its default of 0.8 to 0.9 leaves nothing for a second server."""
ROUNDS_OF_CLIENTS = 6
"""Requests of a run for each client, but at least ``MIN_REQUESTS``."""
MIN_REQUESTS = 24


class Server(NamedTuple):
    name: str
    url: str
    model: str
    words: int
    """Words of a prompt: as many as make ``PROMPT`` tokens."""
    process: subprocess.Popen[bytes] | None
    """To be stopped while others are measured; ``None``: it is left alone."""


class Figures(msgspec.Struct, frozen=True):
    """What one run of ``penstock bench serve`` found."""

    requests_per_s: float
    output_tokens_per_s: float
    ttft_ms: float
    """Median."""
    tpot_ms: float
    """Median."""


class ComparisonFailed(RuntimeError):
    """A server did not start, or a run was not what was asked for."""


def endless_model(folder: Path, name: str) -> Path:
    """A random checkpoint without an end token, bf16."""
    model = make_model(folder, dtype="bfloat16", **SIZES[name])
    for file in ("config.json", "generation_config.json"):
        fields = json.loads((model / file).read_text())
        (model / file).write_text(json.dumps(fields | {"eos_token_id": None}, indent=2))
    return model


@contextlib.contextmanager
def transformers_server(python: Path, model: Path, threads: int, log: Path) -> Iterator[Server]:
    """`transformers serve` with so many threads. Raises ``ComparisonFailed``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cache = log.parent / "hub"
    cache.mkdir(exist_ok=True)
    threads_only = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    environment = {**os.environ, **threads_only, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)}
    command = [
        str(python.with_name("transformers")), "serve", str(model), "--continuous-batching",
        "--device", "cpu", "--dtype", "auto", "--host", "127.0.0.1", "--port", str(port),
        "--cb-max-memory-percent", str(KV_SHARE),
    ]  # fmt: skip
    with log.open("wb") as output:
        # A session of its own: an orphaned process group with a stopped member gets SIGHUP.
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url, process, log)
        process.send_signal(signal.SIGSTOP)
        name = f"transformers, {threads} threads"
        yield Server(name, url, str(model), words_for(model, PROMPT), process)
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url + "/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.25)
    raise ComparisonFailed(f"`transformers serve` did not start:\n{log.read_text()[-3000:]}")


def run(server: Server, clients: int, requests: int, tokens: int, seed: int) -> Figures:
    """One run of the load generator. Raises ``ComparisonFailed``."""
    with tempfile.TemporaryDirectory() as place:
        result = Path(place) / "result.json"
        command = [
            sys.executable, "-m", "penstock.services", "bench", "serve",
            "--base-url", server.url, "--model", server.model, "--ready-timeout", "0",
            "--num-prompts", str(requests), "--max-concurrency", str(clients),
            "--warmup-requests", str(clients), "--random-format", "text",
            "--random-input-len", str(server.words), "--random-output-len", str(tokens),
            "--temperature", "0", "--seed", str(seed), "--save-result", str(result), "--quiet",
        ]  # fmt: skip
        if server.process is not None:
            server.process.send_signal(signal.SIGCONT)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if server.process is not None:
            server.process.send_signal(signal.SIGSTOP)
        if done.returncode:
            raise ComparisonFailed(f"{server.name}:\n{done.stdout}{done.stderr}")
        found = json.loads(result.read_text())
    made, wanted = found["total_output_tokens"], requests * tokens
    if made != wanted:
        raise ComparisonFailed(f"{server.name}: {made} tokens, not {wanted}: an answer ended early")
    return Figures(
        found["request_throughput"],
        found["output_throughput"],
        found["median_ttft_ms"],
        found["median_tpot_ms"],
    )


def compare(servers: list[Server], clients: int, rounds: int, tokens: int) -> dict[str, object]:
    """One row of the table: ``servers[0]`` is ours."""
    requests = max(MIN_REQUESTS, ROUNDS_OF_CLIENTS * clients)
    runs: dict[str, list[Figures]] = {server.name: [] for server in servers}
    for seed in range(rounds):
        for server in servers:
            runs[server.name].append(run(server, clients, requests, tokens, seed))
    own, *others = runs.values()
    other = max(others, key=lambda found: statistics.median(f.requests_per_s for f in found))
    pairs = list(zip(own, other, strict=True))
    speed = sorted(a.requests_per_s / b.requests_per_s for a, b in pairs)
    wait = sorted(a.ttft_ms / b.ttft_ms for a, b in pairs)
    medians = {
        name: {
            field: round(statistics.median(getattr(one, field) for one in found), 2)
            for field in Figures.__struct_fields__
        }
        for name, found in runs.items()
    }
    return {
        "clients": clients,
        "requests": requests,
        **medians,
        "requests_ratio": [round(value, 2) for value in (statistics.median(speed), *speed)],
        "ttft_ratio": [round(value, 2) for value in (statistics.median(wait), *wait)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--transformers-python", type=Path, default=Path(sys.executable))
    parser.add_argument("--model", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    cores = psutil.cpu_count(logical=False) or 1
    parser.add_argument("--transformers-threads", nargs="+", type=int, default=sorted({1, cores}))
    options = parser.parse_args()
    # As an exception, so that the servers are ended too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
            model = endless_model(Path(place) / "model", options.model)
            url = stack.enter_context(own_server([str(model), "--device", "cpu"]))
            servers = [Server("penstock", url, "model", words_for(model, PROMPT), None)]
            for threads in options.transformers_threads:
                log = Path(place) / f"transformers-{threads}.log"
                python = options.transformers_python.absolute()
                server = stack.enter_context(transformers_server(python, model, threads, log))
                servers.append(server)
            for clients in options.clients:
                row = compare(servers, clients, options.rounds, options.tokens)
                print(json.dumps(row), flush=True)
    except ComparisonFailed as error:
        print(f"compare_cpu_http: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
