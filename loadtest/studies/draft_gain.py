"""What drafts gain or cost: the same requests with several ``--speculative``, in turns.

    python -m penstock.loadtest.studies.draft_gain MODEL --device cuda --load-format dummy

Each has a server of its own on the same device, and answers every round of random prompts behind
the first one, which counts for nothing: greedy and drawn, a few at a time, and many at once. Of
weights drawn at random greedy texts fall into loops, which drafts foresee, and drawn ones repeat
nothing. The ratio is taken round by round to the first one named; median (least to greatest).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import NamedTuple

from penstock import LLM, SamplingParams
from penstock.loadtest.offline.offline_requests import draw_requests, moved
from penstock.loadtest.options import integer
from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.requests import Work
from penstock.services.launcher.builtin_model import builtin_model
from penstock.services.library.member import Submission

MANY = 256
"""Requests of the load that is like W1: of 100 to 1,024 tokens in and out, temperature 0.6."""
INPUT_LEN = 128


class Counting(LLM):
    """Counts the drafts of all its answers."""

    accepted = rejected = 0

    def _submitted(
        self, works: Iterable[Work], count: int, progress: bool | None, max_open: int
    ) -> list[Submission]:
        found = super()._submitted(works, count, progress, max_open)
        for one in found:
            for answer in one.answers:
                if answer.end is not None:
                    self.accepted += answer.end.accepted_drafts
                    self.rejected += answer.end.rejected_drafts
        return found


class Load(NamedTuple):
    """Requests that are asked at once."""

    name: str
    prompts: list[list[int]]
    params: list[SamplingParams]


def _few(batch: int, temperature: float, tokens: int) -> Load:
    params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
    drawn = draw_requests(batch, (INPUT_LEN, INPUT_LEN), (1, 1), batch)
    return Load(f"batch {batch}, temperature {temperature}", drawn.prompts, [params] * batch)


def _many() -> Load:
    drawn = draw_requests(MANY, (100, 1024), (100, 1024), 0)
    params = [
        SamplingParams(temperature=0.6, max_tokens=length, ignore_eos=True)
        for length in drawn.output_lens
    ]
    return Load(f"{MANY} at once, temperature 0.6", drawn.prompts, params)


def _measure(load: Load, engines: dict[str, Counting], rounds: int, vocab_size: int) -> None:
    rates: dict[str, list[float]] = {name: [] for name in engines}
    counts: dict[str, tuple[int, int]] = {}
    for number in range(rounds + 1):
        prompts = moved(load.prompts, number, vocab_size)
        for name, llm in engines.items():
            llm.accepted = llm.rejected = 0
            began = time.perf_counter()
            answers = llm.generate(prompts, load.params, progress=False)
            seconds = time.perf_counter() - began
            if number:
                tokens = sum(len(one.outputs[0].token_ids) for one in answers)
                rates[name].append(tokens / seconds)
                counts[name] = llm.accepted, llm.rejected
    first = next(iter(rates))
    for name, found in rates.items():
        ratios = sorted(one / other for one, other in zip(found, rates[first], strict=True))
        accepted, rejected = counts[name]
        print(
            f"{load.name} | {name} | {median(found):,.0f} tokens/s | {median(ratios):.3f} "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f}) | drafts of the last round: {accepted} "
            f"accepted, {rejected} rejected",
            flush=True,
        )


def main(arguments: Sequence[str]) -> int:
    parsed = _parser().parse_args(arguments)
    settings = {"device": parsed.device, "load_format": parsed.load_format}
    if parsed.kv_cache_memory_bytes:
        settings["kv_cache_memory_bytes"] = parsed.kv_cache_memory_bytes
    vocab_size = read_model_info(parsed.model or builtin_model()).vocab_size
    loads = [
        _few(batch, temperature, parsed.output_len)
        for temperature in (0.0, 0.6)
        for batch in parsed.batch_size
    ]
    with ExitStack() as open_engines:
        engines = {
            name: open_engines.enter_context(Counting(parsed.model, speculative=name, **settings))
            for name in parsed.speculative
        }
        for load in loads:
            _measure(load, engines, parsed.rounds, vocab_size)
        if parsed.many_rounds:
            _measure(_many(), engines, parsed.many_rounds, vocab_size)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="", help="by default the built-in one")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--speculative", nargs="+", default=["off", "auto"])
    parser.add_argument("--batch-size", type=integer(1, 10_000), nargs="+", default=[1, 8])
    parser.add_argument("--output-len", type=integer(2, 2048), default=400, metavar="N")
    parser.add_argument("--rounds", type=integer(1, 1000), default=5, metavar="N")
    parser.add_argument(
        "--many-rounds", type=integer(0, 1000), default=3, metavar="N",
        help=f"rounds of {MANY} requests at once; 0: none",
    )  # fmt: skip
    parser.add_argument(
        "--kv-cache-memory-bytes", type=integer(1, 2**60), metavar="N",
        help="of each server; by default a GPU has no room for two",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
