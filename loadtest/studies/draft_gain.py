"""What drafts gain or cost: the same requests with several ``--speculative``, in turns.

    python -m penstock.loadtest.studies.draft_gain MODEL --device cuda --load-format dummy

Each has a server of its own on the same device, and answers every round of prompts behind the first
one, which counts for nothing. The ratio is taken round by round to the first one named; median
(least to greatest). The loads, a few requests at a time but for the last:

    greedy  random prompts; texts of random weights fall into loops, which drafts foresee
    drawn   random prompts at temperature 0.6; texts of random weights repeat nothing
    json    random prompts, whose answers follow a schema of records
    again   the same prompts and seeds in every round: answers that were given before
    edited  a text that is to be written again; of a model that makes text
    many    256 at once, of 100 to 1,024 tokens in and out, temperature 0.6
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from msgspec.structs import replace

import penstock
from penstock import LLM, SamplingParams
from penstock.loadtest.offline.offline_requests import draw_requests, moved
from penstock.loadtest.options import integer
from penstock.protocol.grammar.request import from_structured_outputs
from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.requests import Work
from penstock.services.launcher.builtin_model import builtin_model
from penstock.services.library.member import Submission

Prompts = list[list[int]] | list[str]

MANY = 256
"""Requests of the load that is like W1."""
INPUT_LEN = 128
LOADS = ("greedy", "drawn", "json", "again", "edited", "many")
SCHEMA = Path(penstock.__file__).parent / "loadtest" / "schemas" / "people.json"
ANIMALS, DEEDS = ("fox", "owl", "cat", "dog", "hen", "cow"), ("runs", "sleeps", "eats", "sings")


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
    prompts: Callable[[int], Prompts]
    """By the round."""
    params: list[SamplingParams]


def _load(name: str, batch: int, tokens: int, vocab_size: int) -> Load:
    params = SamplingParams(
        temperature=0.0 if name in {"greedy", "edited"} else 0.6,
        max_tokens=tokens,
        ignore_eos=True,
        structured_outputs=_schema() if name == "json" else None,
    )
    drawn = draw_requests(batch, (INPUT_LEN, INPUT_LEN), (1, 1), batch).prompts

    def prompts(number: int) -> Prompts:
        if name == "edited":
            return _texts(batch, number)
        return moved(drawn, 0 if name == "again" else number, vocab_size)

    every = [params] * batch
    if name == "again":
        every = [replace(params, seed=seed) for seed in range(batch)]
    return Load(f"{name}, batch {batch}", prompts, every)


def _schema() -> Any:
    return from_structured_outputs(
        {"json": SCHEMA.read_text(encoding="utf-8"), "disable_any_whitespace": True}
    )


def _texts(batch: int, number: int) -> list[str]:
    """Texts that have begun again."""
    draw, texts = random.Random(1000 * batch + number), []
    for _ in range(batch):
        said = [f"The {draw.choice(ANIMALS)} {draw.choice(DEEDS)}." for _ in range(16)]
        texts.append(" ".join([*said, *said[:6]]))
    return texts


def _many(vocab_size: int) -> Load:
    drawn = draw_requests(MANY, (100, 1024), (100, 1024), 0)
    params = [
        SamplingParams(temperature=0.6, max_tokens=length, ignore_eos=True)
        for length in drawn.output_lens
    ]
    return Load(f"{MANY} at once", partial(moved, drawn.prompts, vocab_size=vocab_size), params)


def _measure(load: Load, engines: dict[str, Counting], rounds: int) -> None:
    rates: dict[str, list[float]] = {name: [] for name in engines}
    counts: dict[str, tuple[int, int]] = {}
    for number in range(rounds + 1):
        prompts = load.prompts(number)
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
        _load(name, batch, parsed.output_len, vocab_size)
        for name in parsed.loads
        if name != "many"
        for batch in parsed.batch_size
    ]
    with ExitStack() as open_engines:
        engines = {
            name: open_engines.enter_context(Counting(parsed.model, speculative=name, **settings))
            for name in parsed.speculative
        }
        for load in loads:
            _measure(load, engines, parsed.rounds)
        if "many" in parsed.loads:
            _measure(_many(vocab_size), engines, parsed.many_rounds)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="", help="by default the built-in one")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--speculative", nargs="+", default=["off", "auto"])
    parser.add_argument(
        "--loads", choices=LOADS, nargs="+", default=[name for name in LOADS if name != "edited"]
    )
    parser.add_argument("--batch-size", type=integer(1, 10_000), nargs="+", default=[1, 8])
    parser.add_argument("--output-len", type=integer(2, 2048), default=400, metavar="N")
    parser.add_argument("--rounds", type=integer(1, 1000), default=5, metavar="N")
    parser.add_argument(
        "--many-rounds", type=integer(1, 1000), default=3, metavar="N", help="of the load many"
    )  # fmt: skip
    parser.add_argument(
        "--kv-cache-memory-bytes", type=integer(1, 2**60), metavar="N",
        help="of each server; by default a GPU has no room for two",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
