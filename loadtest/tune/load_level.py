"""One load on a server, by ``penstock bench serve``, and what came of it."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from penstock.loadtest.tune.objective import RANGE, SHARE, Objective, Workload, shown_ms

ENDING_S = 5.0
MANY = 30
"""Of fewer requests the last answer is too large a part of the time to tell a rate by."""
BEHIND, ANSWERS = 1.25, 3.0
"""A load that takes longer than its arrivals, times this, and so many answers behind them, lets the
queue grow: a longer one would keep no TTFT."""


class Level(msgspec.Struct, frozen=True):
    """Requests at one rate."""

    rate: float
    """Requests a second; 0: each waited for the one before it."""
    requests: int
    failed: int
    """Those that ended with an error, and those that had not ended in time."""
    kept: float
    """Share of all requests that kept the objective."""
    ttft: float
    """Milliseconds, of the percentile ``SHARE``; TPOT, too."""
    tpot: float
    most_open: int
    seconds: float
    output: float
    """Tokens of answers a second."""
    is_cut: bool = False
    """Whether time was up before all were answered: it says nothing then."""
    cpu: dict[str, float] = {}
    """Cores that the processes of each service used."""

    def keeps(self, answer_s: float) -> bool:
        """Whether the objective was kept, and would be by a load that goes on. answer_s: of a
        request that is alone."""
        if self.kept < SHARE:
            return False
        if self.rate == 0 or self.requests < MANY:
            return True
        return self.seconds <= BEHIND * self.requests / self.rate + ANSWERS * answer_s

    @property
    def p90(self) -> str:
        return f"TTFT {shown_ms(self.ttft)} and TPOT {shown_ms(self.tpot)}"

    def __str__(self) -> str:
        asked = f"{self.rate:.3g} requests/s" if self.rate else "one at a time"
        failed = f", {self.failed} without an end" if self.failed else ""
        return (
            f"{asked}: {100 * self.kept:.0f} % of {self.requests} kept it{failed}; 90 % had "
            f"{self.p90}; {self.output:.4g} tokens/s, {self.most_open} open at most"
        )


def put_load(
    url: str,
    objective: Objective,
    workload: Workload,
    *,
    rate: float,
    requests: int,
    seed: int,
    limit_s: float,
) -> Level:
    """So many requests at this rate, 0: one after another, at most for so long. seed: of prompts;
    those of another load must not be found in the cache. Raises ``LoadFailed``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "level.json"
        command = [sys.executable, "-m", "penstock.services", "bench", "serve", "--base-url", url]
        command += ["--num-prompts", str(requests), "--seed", str(seed), "--quiet", "--ignore-eos"]
        command += ["--random-input-len", str(workload.prompt), "--random-range-ratio", str(RANGE)]
        command += ["--random-output-len", str(workload.answer), "--save-result", str(path)]
        command += ["--metric-percentiles", f"{100 * SHARE:g}", "--goodput", *objective.flags]
        command += ["--request-rate", f"{rate:g}"] if rate else ["--max-concurrency", "1"]
        code, said = _within(command, limit_s)
        try:
            result: dict[str, Any] = msgspec.json.decode(path.read_bytes())
        except (OSError, msgspec.DecodeError):
            raise LoadFailed(f"the load ended with {code} and no result: {said}") from None
    return _level(result, rate)


class LoadFailed(RuntimeError):
    """No load could be put on the server."""


def _within(command: list[str], limit_s: float) -> tuple[int, str]:
    """Run it; SIGINT, behind which it tells what it has, ends it after so long. Returns its exit
    code and the last line that it said of an error."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        try:
            _, said = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=ENDING_S)
    except subprocess.TimeoutExpired:
        said = "it did not end"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return process.returncode, (said.strip().splitlines() or ["nothing was said"])[-1]


def _level(result: dict[str, Any], rate: float) -> Level:
    failed = result["failed"] + result["interrupted"]
    requests = max(1, result["completed"] + failed)
    kept = result["request_goodput"] * result["duration"] / requests
    name = f"p{100 * SHARE:g}"
    return Level(
        rate=rate,
        requests=requests,
        failed=failed,
        kept=min(1.0, kept),
        ttft=result[f"{name}_ttft_ms"],
        tpot=result[f"{name}_tpot_ms"],
        most_open=result["max_concurrent_requests"],
        seconds=result["duration"],
        output=result["output_throughput"],
        is_cut=result["interrupted"] > 0,
    )
