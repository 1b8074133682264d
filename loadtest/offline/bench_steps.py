"""``penstock bench steps``: where the time of a step goes, and how it grows.

The worker's executor alone, in this process: no scheduler, no server. The KV cache holds zeros and
counts as computed, so any context costs no prefill.

Exit codes: 0, 1 the executor failed, 2 wrong flags, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import msgspec

from penstock.loadtest.offline.offline_engine import (
    WRONG_SETTINGS,
    Engine,
    described,
    engine_of,
    guarded,
    parser_for,
)
from penstock.loadtest.offline.step_timer import PROMPT_TOKENS, StepTimer, kernel_times, prompts_of
from penstock.loadtest.options import integer
from penstock.loadtest.progress import note
from penstock.loadtest.reports import report
from penstock.protocol.config import Config, ConfigError
from penstock.services.worker.executor import Executor
from penstock.services.worker.loading import load_executor

COLUMNS = {
    "rows": "rows", "context": "context", "prefill": "prefill", "step_us": "step µs",
    "device_us": "device µs",
    "between_percent": "between %", "launch_us": "host µs", "tokens_per_second": "tokens/s",
}  # fmt: skip
KERNEL_COLUMNS = {
    "rows": "rows", "context": "context", "prefill": "prefill", "name": "kernel", "calls": "calls",
    "us": "µs a step", "percent": "%",
}  # fmt: skip
ROWS, CONTEXTS = [1, 8, 64, 256], [512]
SHOWN_KERNELS = 12


def main(arguments: Sequence[str]) -> int:
    """Run with these flags. Returns the exit code."""
    parsed = _parser().parse_args(arguments)
    engine = engine_of(parsed)
    if parsed.temperature < 0:
        print(f"penstock: --temperature {parsed.temperature}: at least 0", file=sys.stderr)
        return WRONG_SETTINGS

    def measure() -> dict[str, Any]:
        executor = load_executor(_with_room(engine, parsed), lambda text: None)
        rows = list(_measured(executor, parsed))
        kernels = [line for row in rows for line in row.pop("kernels")]
        return {
            **described("steps", arguments, engine),
            "executor": executor.summary,
            "steps": parsed.steps,
            "prefix_len": parsed.prefix_len,
            "prompt_tokens": PROMPT_TOKENS,
            "decode": rows,
            "kernels": kernels,
        }

    return guarded(measure, _table, parsed)


def _parser() -> argparse.ArgumentParser:
    parser = parser_for("steps", "Time steps of the worker's executor, without a server.")
    group = parser.add_argument_group("what is measured")
    count = integer(1, 2**20)
    group.add_argument(
        "--rows", type=count, nargs="+", default=ROWS, metavar="N",
        help="sequences that decode (default: 1 8 64 256)",
    )  # fmt: skip
    group.add_argument(
        "--context", type=count, nargs="+", default=CONTEXTS, metavar="N",
        help="positions before a step's token (default: 512)",
    )  # fmt: skip
    group.add_argument(
        "--prefix-len", type=integer(0, 2**20), default=0, metavar="N",
        help="positions of the context that all sequences share (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--prefill-len", type=integer(0, 2**20), nargs="+", default=[0], metavar="N",
        help="tokens of new prompts in each step, beside the rows (default: 0)",
    )  # fmt: skip
    group.add_argument("--steps", type=count, default=200, metavar="N", help="(default: 200)")
    group.add_argument("--temperature", type=float, default=0.6, metavar="X", help="(default: 0.6)")
    group.add_argument(
        "--no-kernels", action="store_true", help="do not profile the kernels of a CUDA device"
    )
    return parser


def _with_room(engine: Engine, parsed: argparse.Namespace) -> Config:
    """The configuration, with slots for the greatest ``--rows`` and the prompts beside them."""
    slots = max(parsed.rows) + len(prompts_of(max(parsed.prefill_len)))
    scheduler = engine.config.scheduler
    model = msgspec.structs.replace(engine.config.model, model=str(engine.info.folder))
    if slots > scheduler.max_num_seqs:
        scheduler = msgspec.structs.replace(
            scheduler,
            max_num_seqs=slots,
            max_num_batched_tokens=max(slots, scheduler.max_num_batched_tokens),
        )
    return msgspec.structs.replace(engine.config, model=model, scheduler=scheduler)


def _measured(executor: Executor, parsed: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each number of rows and context; without figures where memory is too small."""
    cases = product(parsed.context, parsed.prefill_len, parsed.rows)
    for context, prefill, rows in cases:
        if not parsed.quiet and sys.stderr.isatty():
            note(f"{rows} rows, context {context}, prefill {prefill}")
        case = {"rows": rows, "context": context, "prefill": prefill}
        row: dict[str, Any] = dict.fromkeys(COLUMNS) | case | {"kernels": []}
        try:
            timer = StepTimer(
                executor, rows, context, 3 * parsed.steps, parsed.temperature, parsed.prefix_len,
                prefill,
            )  # fmt: skip
        except ConfigError as error:
            row["note"] = str(error)
        else:
            times = timer.measure(parsed.steps)
            row |= msgspec.to_builtins(times)
            row["tokens_per_second"] = rows / times.step_us * 1e6
            if not parsed.no_kernels:
                found = kernel_times(timer, min(parsed.steps, 20))
                total = sum(kernel.us for kernel in found) or 1.0
                row["kernels"] = [
                    {**case, **msgspec.to_builtins(kernel), "percent": 100 * kernel.us / total}
                    for kernel in found
                ]
            timer.close()
        yield row


def _table(result: dict[str, Any]) -> str:
    notes = [
        f"{row['rows']} rows after {row['context']}, prefill {row['prefill']}: {row['note']}"
        for row in result["decode"]
        if "note" in row
    ]
    parts = [report.table(COLUMNS, result["decode"]), *notes]
    for row in result["decode"]:
        lines = [
            line
            for line in result["kernels"]
            if all(line[name] == row[name] for name in ("rows", "context", "prefill"))
        ]
        if lines:
            parts += ["", report.table(KERNEL_COLUMNS, lines[:SHOWN_KERNELS])]
    return "\n".join(parts)
