"""How well requests find the engine that has cached their beginning: conversations over engines.

    python -m penstock.loadtest.studies.prefix_affinity [--engines 8] [--conversations 200] [--json]

Conversations of growing length run beside each other, each turn repeats all turns before it, and
one engine's KV memory holds a small part of them. The router's dispatcher, the schedulers' cores
with their prefix caches, the digests and the beats are the real ones; the clock is computed, and a
step takes as long as ``simulate_policies.StepTime`` says. Three rows are compared: one engine that
has the memory and the speed of all, the engines with the router as it is, and the same without
digests, where a request goes wherever there is room.

It also measures what a request costs the router, and what strangers with random prompts make of it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import msgspec

from penstock.loadtest.studies.counted_router import strangers
from penstock.loadtest.studies.simulate_policies import StepTime
from penstock.loadtest.studies.simulated_conversations import (
    BLOCK,
    Result,
    Setting,
    Simulation,
    conversations,
)
from penstock.protocol.prefix_digest import MAX_DIGESTS


def measure(setting: Setting) -> list[Result]:
    """One engine with all memory, the engines with affinity, the engines without."""
    total = sum(
        len(client.tokens) + sum(len(question) + answer for question, answer in client.turns)
        for client in conversations(setting)
    )
    blocks = int(setting.memory * total / setting.engines / BLOCK)
    many = setting.engines
    usual, speed = StepTime(), setting.speed
    step = StepTime(usual.base / speed, usual.prefill_token / speed, usual.decode_row / speed)
    fast = StepTime(step.base, step.prefill_token / many, step.decode_row / many)
    one = replace(setting, engines=1)
    rows = [Simulation(one, setting.limits(blocks * many, many), fast, True).run()]
    rows += [
        Simulation(setting, setting.limits(blocks), step, digests).run()
        for digests in (True, False)
    ]
    return rows


def table(rows: list[Result]) -> str:
    """A Markdown table."""
    lines = [
        "| | requests | hit rate | requests, max / mean | computed, max / mean | mean TTFT | "
        "router, a request | a beat | largest beat |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row.name} | {row.requests} | {row.hit_rate:.3f} | {row.requests_imbalance:.2f} | "
        f"{row.computed_imbalance:.2f} | {1000 * row.mean_ttft:.0f} ms | {row.router_us:.0f} µs | "
        f"{row.beat_us:.0f} µs | {row.largest_beat} B |"
        for row in rows
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command. Returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m penstock.loadtest.studies.prefix_affinity",
        description="Measure how well requests find the engine that has cached their beginning.",
    )
    defaults = Setting()
    parser.add_argument("--engines", type=int, default=defaults.engines)
    parser.add_argument("--conversations", type=int, default=defaults.conversations)
    parser.add_argument("--memory", type=float, default=defaults.memory, help="in all lengths")
    parser.add_argument("--pause", type=float, default=defaults.pause, help="mean, in seconds")
    parser.add_argument("--speed", type=float, default=defaults.speed, help="of an engine")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    arguments = vars(parser.parse_args(argv))
    as_json = arguments.pop("json")
    rows = measure(Setting(**arguments))
    random_prompts = [strangers(arguments["engines"], 20_000, count) for count in (24, MAX_DIGESTS)]
    if as_json:
        print(msgspec.json.encode([rows, random_prompts]).decode())
        return 0
    print(table(rows))
    print(f"hit rate of {rows[1].hit_rate / rows[0].hit_rate:.3f} of one engine's; ", end="")
    print(f"placed by {rows[1].placed_by}")
    for one in random_prompts:
        print(f"random prompts: {one}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
