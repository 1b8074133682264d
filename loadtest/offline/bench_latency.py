"""``penstock bench latency``: how long one batch of equal requests takes.

Exit codes: 0, 1 the library failed, 2 wrong flags, 130 interrupted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from penstock import LLM, SamplingParams
from penstock.loadtest.offline.offline_engine import (
    WRONG_SETTINGS,
    Engine,
    check_length,
    described,
    engine_of,
    guarded,
    parser_for,
)
from penstock.loadtest.offline.offline_requests import draw_requests, moved
from penstock.loadtest.options import integer
from penstock.loadtest.reports import report


def main(arguments: Sequence[str]) -> int:
    """Run with these flags. Returns the exit code."""
    parser = parser_for("latency", "Complete batches of equal requests greedily, one at a time.")
    group = parser.add_argument_group("what is asked (--seed draws it)")
    length = integer(1, 2**31 - 1)
    group.add_argument(
        "--batch-size", type=length, nargs="+", default=[1, 8, 64], metavar="N",
        help="requests at the same time (default: 1 8 64)",
    )  # fmt: skip
    group.add_argument("--input-len", type=length, default=128, metavar="N")
    group.add_argument("--output-len", type=integer(2, 2**31 - 1), default=512, metavar="N")
    group.add_argument("--num-iters", type=length, default=3, metavar="N", help="(default: 3)")
    group.add_argument(
        "--num-iters-warmup", type=integer(0, 1000), default=1, metavar="N", help="(default: 1)"
    )
    parsed = parser.parse_args(arguments)
    engine = engine_of(parsed)
    try:
        check_length(engine, parsed.input_len + parsed.output_len)
    except ValueError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return WRONG_SETTINGS

    def measure() -> dict[str, Any]:
        batches = []
        with LLM(**engine.settings) as llm:
            for size in parsed.batch_size:
                timer = BatchTimer(llm, engine, size, parsed.input_len)
                for _ in range(parsed.num_iters_warmup):
                    timer.seconds(parsed.output_len)
                batches.append(_batch(timer, parsed.output_len, parsed.num_iters))
        return {
            **described("latency", arguments, engine),
            "input_len": parsed.input_len,
            "output_len": parsed.output_len,
            "batches": batches,
        }

    return guarded(measure, _table, parsed)


class BatchTimer:
    """Times one batch; every time with other ids, so that no prompt is in the prefix cache."""

    def __init__(self, llm: LLM, engine: Engine, size: int, input_len: int) -> None:
        self._llm = llm
        self._vocab_size = engine.info.vocab_size
        lengths = (input_len, input_len)
        self._prompts = draw_requests(size, lengths, lengths, engine.seed + size).prompts
        self.size = size
        self._used = 0

    def seconds(self, output_len: int) -> float:
        """From handing the batch over to its last token."""
        self._used += 1
        prompts = moved(self._prompts, self._used, self._vocab_size)
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        began = time.perf_counter()
        self._llm.generate(prompts, params, progress=False)
        return time.perf_counter() - began


def _batch(timer: BatchTimer, output_len: int, iterations: int) -> dict[str, Any]:
    """One row. A decode step is the time of all tokens but the first, which is measured alone."""
    first = [timer.seconds(1) for _ in range(iterations)]
    whole = [timer.seconds(output_len) for _ in range(iterations)]
    latency = median(whole)
    return {
        "batch_size": timer.size,
        "avg_latency": sum(whole) / len(whole),
        "median_latency": latency,
        "latencies": whole,
        "first_token_latency": median(first),
        "ms_per_token": latency / output_len * 1e3,
        "ms_per_step": (latency - median(first)) / (output_len - 1) * 1e3,
        "output_tokens_per_second": timer.size * output_len / latency,
    }


def _table(result: dict[str, Any]) -> str:
    names = {
        "batch_size": "batch",
        "first_token_latency": "first token s",
        "median_latency": "all tokens s",
        "ms_per_token": "ms/token",
        "ms_per_step": "ms/decode step",
        "output_tokens_per_second": "tokens/s",
    }
    return report.table(names, result["batches"])
