"""``penstock bench throughput``: how many tokens a second the library makes of many prompts.

Exit codes: 0, 1 the library failed, 2 wrong flags, 130 interrupted.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
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
from penstock.loadtest.offline.offline_requests import OfflineRequests, draw_requests, moved
from penstock.loadtest.options import integer, length_range, number
from penstock.loadtest.reports import report
from penstock.protocol.config.adapters import named_folders
from penstock.protocol.grammar.request import from_structured_outputs


def main(arguments: Sequence[str]) -> int:
    """Run with these flags. Returns the exit code."""
    parser = parser_for("throughput", "Complete random prompts with the library, all at once.")
    group = parser.add_argument_group("what is asked (--seed draws it)")
    group.add_argument("--num-prompts", type=integer(1, 10_000_000), default=256, metavar="N")
    for name in ("input", "output"):
        group.add_argument(
            f"--{name}-len", type=length_range, default=(100, 1024), metavar="LOW:HIGH",
            help=f"{name} tokens, drawn evenly (default: 100:1024)",
        )  # fmt: skip
    group.add_argument(
        "--prefix-len", type=integer(0, 2**20), default=0, metavar="N",
        help="common tokens before each prompt's own (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--max-concurrency", type=integer(1, 2**20), metavar="N",
        help="requests open at a time (default: all that the library opens at once)",
    )  # fmt: skip
    group.add_argument("--temperature", type=number(0, 100), default=0.6, metavar="X")
    group.add_argument(
        "--json-schema", type=Path, metavar="FILE", help="every answer follows this JSON schema"
    )
    group.add_argument(
        "--random-adapters", type=number(0, 1), nargs="?", const=1.0, metavar="SHARE",
        help="so many of the prompts (default: 1, all) have one of the adapters of --lora, drawn "
        "evenly",
    )  # fmt: skip
    group.add_argument(
        "--runs", type=integer(1, 1000), default=1, metavar="N", help="the middle one counts"
    )
    parsed = parser.parse_args(arguments)
    engine = engine_of(parsed)
    requests = draw_requests(
        parsed.num_prompts, parsed.input_len, parsed.output_len, engine.seed, parsed.prefix_len
    )
    if parsed.random_adapters is not None and not engine.config.loading.lora:
        print("penstock: --random-adapters draws among those of --lora; give some", file=sys.stderr)
        return WRONG_SETTINGS
    longest = zip(requests.prompts, requests.output_lens, strict=True)
    try:
        check_length(engine, max(len(prompt) + out for prompt, out in longest))
    except ValueError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return WRONG_SETTINGS

    def measure() -> dict[str, Any]:
        found = _measure(engine, requests, parsed)
        return {**described("throughput", arguments, engine), **found}

    return guarded(measure, _table, parsed)


def _measure(
    engine: Engine, requests: OfflineRequests, parsed: argparse.Namespace
) -> dict[str, Any]:
    grammar = None
    if parsed.json_schema is not None:
        schema = parsed.json_schema.read_text(encoding="utf-8")
        grammar = from_structured_outputs({"json": schema})
    params = [
        SamplingParams(
            temperature=parsed.temperature,
            max_tokens=length,
            ignore_eos=True,
            structured_outputs=grammar,
        )
        for length in requests.output_lens
    ]
    share = parsed.random_adapters
    adapters = "" if share is None else _adapters(engine, len(params), share)
    most = {} if parsed.max_concurrency is None else {"max_concurrency": parsed.max_concurrency}
    inputs = sum(map(len, requests.prompts))
    began = time.perf_counter()
    with LLM(**engine.settings) as llm:
        start = time.perf_counter() - began
        llm.generate("Penstock", SamplingParams(temperature=0, max_tokens=8), progress=False)
        times, outputs = [], 0
        for run in range(parsed.runs):
            prompts = moved(requests.prompts, run, engine.info.vocab_size)
            began = time.perf_counter()
            shown = False if parsed.quiet else None
            answers = llm.generate(prompts, params, progress=shown, adapter=adapters, **most)
            times.append(time.perf_counter() - began)
            outputs = sum(len(choice.token_ids) for one in answers for choice in one.outputs)
    elapsed = sorted(times)[len(times) // 2]
    return {
        "num_requests": len(params),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "total_num_tokens": inputs + outputs,
        "elapsed_time": elapsed,
        "elapsed_times": times,
        "requests_per_second": len(params) / elapsed,
        "tokens_per_second": (inputs + outputs) / elapsed,
        "output_tokens_per_second": outputs / elapsed,
        "start_seconds": start,
    }


def _adapters(engine: Engine, count: int, share: float) -> list[str]:
    """The name of each prompt's adapter; empty: it has none."""
    names = [one.name for one in named_folders(engine.config)]
    draw = random.Random(engine.seed)
    return [draw.choice(names) if draw.random() < share else "" for _ in range(count)]


def _table(result: dict[str, Any]) -> str:
    return report.rows(
        [
            ("Requests", result["num_requests"]),
            ("Input tokens", result["total_input_tokens"]),
            ("Output tokens", result["total_output_tokens"]),
            ("Start (s)", result["start_seconds"]),
            ("Duration (s)", result["elapsed_time"]),
            ("Requests a second", result["requests_per_second"]),
            ("Output tokens a second", result["output_tokens_per_second"]),
            ("Input and output tokens a second", result["tokens_per_second"]),
        ]
    )
