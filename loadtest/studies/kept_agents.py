"""Agents whose prompts are a multiple of what the prefix cache holds, with and without a KV tier.

    python -m penstock.loadtest.studies.kept_agents MODEL --sessions 23 --shortest 8000 \\
        --longest 28000 --output 64 --seconds 20 --tier-bytes 70000000000 -- --device cuda \\
        --load-format dummy --num-kv-blocks 6400 --max-model-len 32768

Everything behind ``--`` goes to ``penstock serve``. Each session has ``--turns`` requests, one
after another: a prompt is the one before, its answer and what is new, and grows evenly from
``--shortest`` to ``--longest`` tokens. Sessions begin at different turns; one that ends is followed
by a new one.
All ask at once, so each comes back to a cache through which all others have gone. Two servers run,
one after the other, the first without a tier. What is measured begins when each session has had an
answer and ``--warm`` seconds are over. Shown are requests and prompt tokens a second, the share of
these that came from a cache, the median time to the first token, and what the tier did.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from statistics import median
from typing import NamedTuple

from penstock.loadtest.own_server import own_server
from penstock.loadtest.studies.kept_sessions import metric, prompt_of, stream

MOST_FILL_S = 240.0
TIER_METRICS = (
    "loads", "failed_loads", "load_seconds", "slow_loads", "read_bytes", "stored_bytes",
    "missed_stores",
)  # fmt: skip


class Answered(NamedTuple):
    at: float
    """When the last token came."""
    first_s: float
    """Until the first one."""
    prompt: int
    cached: int
    """Tokens."""


class Shape(NamedTuple):
    """Of all sessions, in tokens."""

    turns: int
    shortest: int
    longest: int
    output: int

    def length(self, turn: int) -> int:
        """Of a prompt."""
        return self.shortest + (self.longest - self.shortest) * turn // max(1, self.turns - 1)


class Agents:
    """Sessions, each in a thread."""

    def __init__(self, url: str, sessions: int, shape: Shape) -> None:
        self._url, self._shape = url, shape
        self._over = threading.Event()
        self._begun = [False] * sessions
        self.answered: list[Answered] = []
        self.failures: list[str] = []
        self._threads = [
            threading.Thread(target=self._run, args=(each,), daemon=True)
            for each in range(sessions)
        ]

    def run(self, warm_s: float, seconds: float) -> float:
        """Returns when the measured time began."""
        began = time.perf_counter()
        for one in self._threads:
            one.start()
        while not all(self._begun) and time.perf_counter() - began < MOST_FILL_S:
            time.sleep(0.05)
        time.sleep(max(0.0, warm_s - (time.perf_counter() - began)))
        measured = time.perf_counter()
        time.sleep(seconds)
        self._over.set()
        return measured

    def _run(self, number: int) -> None:
        draw = random.Random(number)
        turn, again = draw.randrange(self._shape.turns), 0
        prompt: list[int] = []
        while not self._over.is_set():
            lacking = max(1, self._shape.length(turn) - len(prompt))
            prompt += prompt_of(lacking, 1 + number + 1000 * (turn + self._shape.turns * again))
            try:
                prompt += self._ask(prompt)
            except (OSError, RuntimeError) as failure:
                self.failures.append(str(failure))
            self._begun[number] = True
            turn += 1
            if turn == self._shape.turns:
                turn, again, prompt = 0, again + 1, []

    def _ask(self, prompt: list[int]) -> list[int]:
        """The answer's tokens."""
        ids, first, cached, at = list[int](), 0.0, 0, 0.0
        began = time.perf_counter()
        with closing(stream(self._url, prompt, self._shape.output, ids=True)) as events:
            for at, event in events:
                if event.get("usage"):
                    cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
                for choice in event["choices"]:
                    first = first or at - began
                    ids += choice.get("token_ids") or []
                if self._over.is_set():
                    return ids
        self.answered.append(Answered(at, first, len(prompt), cached))
        return ids


def measure(name: str, flags: Sequence[str], asked: argparse.Namespace) -> float:
    """Requests a second."""
    shape = Shape(asked.turns, asked.shortest, asked.longest, asked.output)
    with own_server(["--served-model-name", "kept", *flags]) as url:
        agents = Agents(url, asked.sessions, shape)
        began = agents.run(asked.warm, asked.seconds)
        tier = {one: metric(url, f"penstock_kv_tier_{one}_total") for one in TIER_METRICS}
    counted = [one for one in list(agents.answered) if one.at >= began]
    if not counted:
        raise SystemExit(f"{name}: no answer in {asked.seconds} s {agents.failures[:1]}")
    tokens = sum(one.prompt for one in counted)
    cached = sum(one.cached for one in counted)
    rate = len(counted) / float(asked.seconds)
    print(
        f"{name}: {rate:.2f} requests/s, {tokens / asked.seconds:.0f} prompt tokens/s, "
        f"{cached / tokens:.1%} of them cached, first token after "
        f"{median(one.first_s for one in counted):.3f} s, {len(agents.failures)} failed",
        flush=True,
    )
    if any(tier.values()):
        print(f"{name}:", *(f"{one}={value:.6g}" for one, value in tier.items()), flush=True)
    return rate


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    given = list(arguments)
    end = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="without one it is the built-in one")
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=33)
    parser.add_argument("--shortest", type=int, default=500, help="tokens of a first prompt")
    parser.add_argument("--longest", type=int, default=1500, help="of a last one")
    parser.add_argument("--output", type=int, default=12, help="tokens of each answer")
    parser.add_argument("--warm", type=float, default=4.0, metavar="SECONDS")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--tier-bytes", type=int, default=1 << 30, help="of the keeper's memory")
    parser.add_argument("--tier-flags", nargs="*", default=[], help="more flags of the second one")
    asked = parser.parse_args(given[:end])
    flags = [*([asked.model] if asked.model else []), *given[end + 1 :]]
    without = measure("without a tier", flags, asked)
    tier = ["--kv-tier-memory-bytes", str(asked.tier_bytes), *asked.tier_flags]
    kept = measure("with a tier", [*flags, *tier], asked)
    print(f"with a tier {kept / without:.2f} times the requests")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
