"""``penstock bench prefill``: how fast the library computes prompts, by their length and by how
much of them is in the prefix cache.

Exit codes: 0, 1 the library failed, 2 wrong flags, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
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
from penstock.loadtest.progress import note
from penstock.loadtest.reports import report
from penstock.loadtest.roofline.device_limits import DeviceLimits, add_limit_flags, limits_apart

INPUT_LENS = [128, 512, 2048, 8192, 32_768]
PREFIXES = [1024, 4096, 16_384]
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
COLUMNS = {
    "input_len": "prompt", "cached_len": "cached", "num_prompts": "prompts",
    "median_seconds": "s", "least_seconds": "least", "most_seconds": "most",
    "tokens_per_second": "tokens/s", "tflops": "TFLOP/s", "peak_share": "of peak",
    "floor_tokens_per_second": "floor tokens/s",
}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Run with these flags. Returns the exit code."""
    parsed = _parser().parse_args(arguments)
    engine = engine_of(parsed)
    try:
        lengths = _that_fit(engine, parsed.input_len, INPUT_LENS, 0)
        prefixes = _that_fit(engine, parsed.cached_prefix, PREFIXES, parsed.suffix_len)
    except ValueError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return WRONG_SETTINGS
    if not engine.config.cache.enable_prefix_caching:
        prefixes = []

    def measure() -> dict[str, Any]:
        device, dtype = engine.config.device.device, engine.config.model.dtype
        limits = None if device == "null" else limits_apart(parsed, device, dtype)
        with LLM(**engine.settings) as llm:
            prefill = Prefill(llm, engine, parsed.batch_tokens, parsed.runs, quiet=parsed.quiet)
            rows = [prefill.plain(length) for length in lengths]
            rows += [prefill.after_prefix(prefix, parsed.suffix_len) for prefix in prefixes]
        return {
            **described("prefill", arguments, engine),
            "dtype": dtype,
            "batch_tokens": parsed.batch_tokens,
            "limits": limits,
            "prompts": list(_beside_the_floor(rows, engine, limits)),
        }

    return guarded(measure, _table, parsed)


def _parser() -> argparse.ArgumentParser:
    parser = parser_for("prefill", "Compute prompts with the library, one token out of each.")
    group = parser.add_argument_group("what is asked (--seed draws it)")
    length = integer(1, 2**31 - 1)
    for flag, values, text in (
        ("--input-len", INPUT_LENS, "prompt lengths"),
        ("--cached-prefix", PREFIXES, "tokens of the prompts that are in the cache"),
    ):
        shown = " ".join(map(str, values))
        group.add_argument(
            flag, type=length, nargs="+", metavar="N",
            help=f"{text} (default: those of {shown} that the model allows)",
        )  # fmt: skip
    group.add_argument(
        "--suffix-len", type=length, default=256, metavar="N",
        help="tokens after the cached ones (default: 256)",
    )  # fmt: skip
    group.add_argument(
        "--batch-tokens", type=length, default=32_768, metavar="N",
        help="so many prompts at once as have this many tokens to compute, one at least "
        "(default: 32768)",
    )  # fmt: skip
    group.add_argument("--runs", type=integer(1, 1000), default=3, metavar="N", help="(default: 3)")
    add_limit_flags(parser)
    return parser


def _that_fit(engine: Engine, given: list[int] | None, defaults: list[int], more: int) -> list[int]:
    """The lengths that the model allows with ``more`` tokens and an answer of one. Raises
    ``ValueError`` for one that was given and does not fit."""
    found = []
    for length in given or defaults:
        try:
            check_length(engine, length + more + 1)
        except ValueError:
            if given:
                raise
        else:
            found.append(length)
    return found


class Prefill:
    """Times prompts of one length; every time with other ids, so that nothing but what is meant
    to be in the prefix cache is found there."""

    def __init__(
        self, llm: LLM, engine: Engine, batch_tokens: int, runs: int, *, quiet: bool
    ) -> None:
        self._llm, self._engine = llm, engine
        self._batch_tokens, self._runs = batch_tokens, runs
        self._shown = not quiet and sys.stderr.isatty()
        self._moved = 0

    def plain(self, length: int) -> dict[str, Any]:
        """Prompts of ``length`` tokens."""
        return self._row([], self._draw(max(1, self._batch_tokens // length), length))

    def after_prefix(self, prefix: int, suffix: int) -> dict[str, Any]:
        """Prompts of a common beginning, which was computed before, and a rest of their own."""
        count = max(1, self._batch_tokens // suffix)
        return self._row(self._draw(1, prefix)[0], self._draw(count, suffix))

    def _draw(self, count: int, length: int) -> list[list[int]]:
        return draw_requests(count, (length, length), (1, 1), self._engine.seed + length).prompts

    def _row(self, prefix: list[int], suffixes: list[list[int]]) -> dict[str, Any]:
        length = len(prefix) + len(suffixes[0])
        if self._shown:
            note(f"{len(suffixes)} prompts of {length} tokens")
        self._run(prefix, suffixes[:1])
        seconds, cached = zip(
            *(self._run(prefix, suffixes) for _ in range(self._runs)), strict=True
        )
        middle = median(seconds)
        computed = [length - found for found in cached[0]]
        return {
            "input_len": length,
            "cached_len": round(sum(cached[0]) / len(suffixes)),
            "num_prompts": len(suffixes),
            "median_seconds": middle,
            "least_seconds": min(seconds),
            "most_seconds": max(seconds),
            "seconds": list(seconds),
            "computed_tokens": sum(computed),
            "tokens_per_second": sum(computed) / middle,
            "chunks": list(zip(cached[0], computed, strict=True)),
        }

    def _run(self, prefix: list[int], suffixes: list[list[int]]) -> tuple[float, list[int]]:
        """Seconds, and how many tokens of each prompt were in the cache."""
        self._moved += 1
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        vocab = self._engine.info.vocab_size
        prompts = moved([prefix + suffix for suffix in suffixes], self._moved, vocab)
        if prefix:
            first = prompts[0][: len(prefix) + 1]  # a prompt's last block is never matched whole
            self._llm.generate([first], params, progress=False)
        began = time.perf_counter()
        outputs = self._llm.generate(prompts, params, progress=False)
        return time.perf_counter() - began, [one.num_cached_tokens for one in outputs]


def _beside_the_floor(
    rows: list[dict[str, Any]], engine: Engine, limits: DeviceLimits | None
) -> Iterator[dict[str, Any]]:
    """Adds the operations and the least time of them and of reading the weights once a step."""
    from penstock.loadtest.roofline.decoder_cost import decoder_config, prefill_flops, weight_bytes

    config = decoder_config(engine.info)
    a_step = engine.config.scheduler.max_num_batched_tokens
    for row in rows:
        chunks, tokens = row.pop("chunks"), row["computed_tokens"]
        flops = prefill_flops(config, chunks)
        found: dict[str, Any] = dict.fromkeys(COLUMNS)
        found |= {**row, "flops": flops, "tflops": flops / row["median_seconds"] / 1e12}
        if limits is not None:
            steps = -(-tokens // a_step)
            size = steps * weight_bytes(config, _DTYPE_BYTES[engine.config.model.dtype])
            floor = limits.floor(size, flops)
            found |= {
                "floor_seconds": floor,
                "floor_tokens_per_second": tokens / floor,
                "peak_share": flops / row["median_seconds"] / limits.flops,
            }
        yield found


def _table(result: dict[str, Any]) -> str:
    return f"{report.limits_line(result)}\n\n{report.table(COLUMNS, result['prompts'])}"
