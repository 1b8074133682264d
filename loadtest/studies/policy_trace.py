"""A trace of requests: who asks when, for how much. Recorded as JSON lines.

    python -m penstock.loadtest.studies.policy_trace OUT.jsonl

writes the trace that is kept in ``loadtest/studies/traces/three_tenants.jsonl``: five minutes in
which ``chat`` asks short questions and ``docs`` sends long texts, both at a steady rate, and
``batch`` sends for one of these minutes several times what the engine can do. Arrivals are Poisson,
lengths log-normal: heavy-tailed, with a mean well above the median.
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path

import msgspec

RECORDED = Path(__file__).parent / "traces" / "three_tenants.jsonl"
SEED = 20261121
SECONDS = 300.0
MAX_PROMPT = 3000
MAX_OUTPUT = 1000
OUTPUT_LIMITS = (64, 128, 256, 512, 1024)
"""What clients ask for as ``max_tokens``: the next of these, or the one after it."""


class TraceRequest(msgspec.Struct, frozen=True):
    """One line of a trace."""

    arrival: float
    """Seconds since the trace began."""
    tenant: str
    prompt: int
    """Tokens."""
    output: int
    """Tokens after which the model stops; the scheduler does not know it."""
    max_tokens: int
    """What the client asks for; at least ``output``."""
    priority: int = 0


class Tenant(msgspec.Struct, frozen=True):
    """How one tenant behaves."""

    name: str
    rate: float
    """Requests a second."""
    prompt: tuple[float, float]
    """Median and sigma of a log-normal distribution, in tokens."""
    output: tuple[float, float]
    priority: int
    first: float = 0.0
    """When it begins, in seconds."""
    last: float = SECONDS


TENANTS = (
    Tenant("chat", 3.0, (120.0, 0.9), (90.0, 0.8), 0),
    Tenant("docs", 0.7, (900.0, 0.6), (130.0, 0.6), 1),
    Tenant("batch", 22.0, (250.0, 1.0), (110.0, 1.1), 2, 30.0, 90.0),
)


def generate(
    seed: int = SEED, tenants: tuple[Tenant, ...] = TENANTS, scale: float = 1.0
) -> list[TraceRequest]:
    """The same requests for the same seed. ``scale`` stretches all times, not the rates."""
    rng = random.Random(seed)
    requests = []
    for tenant in tenants:
        now = tenant.first * scale
        while (now := now + rng.expovariate(tenant.rate)) < tenant.last * scale:
            output = _length(rng, *tenant.output, MAX_OUTPUT)
            fitting = [limit for limit in OUTPUT_LIMITS if limit >= output]
            requests.append(
                TraceRequest(
                    arrival=round(now, 3),
                    tenant=tenant.name,
                    prompt=_length(rng, *tenant.prompt, MAX_PROMPT),
                    output=output,
                    max_tokens=rng.choice(fitting[:2]),
                    priority=tenant.priority,
                )
            )
    return sorted(requests, key=lambda request: request.arrival)


def _length(rng: random.Random, median: float, sigma: float, most: int) -> int:
    return max(1, min(most, round(rng.lognormvariate(math.log(median), sigma))))


def read(path: Path) -> list[TraceRequest]:
    """Requests of a file, by arrival. Raises ``ValueError`` that names file and line."""
    requests = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            requests.append(msgspec.json.decode(line, type=TraceRequest))
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return sorted(requests, key=lambda request: request.arrival)


def write(path: Path, requests: list[TraceRequest]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(request) + b"\n" for request in requests))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the trace of three tenants.")
    parser.add_argument("out", type=Path, help="file to write, one JSON object a line")
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args(argv)
    requests = generate(arguments.seed)
    write(arguments.out, requests)
    print(f"{len(requests)} requests of {len(TENANTS)} tenants in {arguments.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
