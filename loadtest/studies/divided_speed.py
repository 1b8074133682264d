"""How fast models that are divided among GPUs compute prompts and answer many clients.

    python -m penstock.loadtest.studies.divided_speed --cards 4 --rate 16 \\
        B:1x1x1 B:1x1x1:fp8 B:2x1x1 B:4x1x1 B:1x1x4 -- --device cuda --load-format dummy

A case is MODEL:LAYOUT or MODEL:LAYOUT:QUANTIZATION, a layout tensor x pipeline x data parallel
size; everything behind ``--`` goes to ``penstock serve``. All servers start at once; then they are
measured, one after the other where they share cards: 32 prompts of 4,096 tokens with an answer of
one, then prompts of 1,024 with answers of 128, 64 at a time, both for each engine, and with
``--rate`` so many a second for ten seconds. Prints a row of a table for each case. Exit codes: 0, 1
a case failed, 2 wrong flags.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from penstock.loadtest.options import integer, number
from penstock.loadtest.studies.divided_layout import Cards, Layout, layout
from penstock.loadtest.studies.divided_server import MODEL, server_in_turn
from penstock.services.library.server_process import ServerFailed

PROMPTS, CONCURRENCY = 32, 64
"""Long prompts, all at once; requests at a time. Both of each engine."""
_COLUMNS = (
    "model, layout", "input tokens/s", "requests/s", "mean TTFT", "median ITL", "p99 ITL",
    "at a rate: mean TTFT", "mean TPOT", "p99 ITL, ms",
)  # fmt: skip


class Case(NamedTuple):
    model: str
    layout: Layout
    quantization: str

    @property
    def name(self) -> str:
        words = [Path(self.model).name, str(self.layout), self.quantization]
        return ", ".join(filter(None, words))

    @property
    def flags(self) -> list[str]:
        return ["--quantization", self.quantization] if self.quantization else []


def case(text: str) -> Case:
    """A type for argparse."""
    model, _, rest = text.partition(":")
    sizes, _, quantization = rest.partition(":")
    return Case(model, layout(sizes), quantization)


def _bench(url: str, inputs: int, outputs: int, requests: int, *more: str) -> dict[str, Any]:
    """The result of ``penstock bench serve``. Raises ``RuntimeError`` with its words."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, "-m", "penstock.services", "bench", "serve", "--base-url", url]
        command += ["--model", MODEL, "--ignore-eos", "--quiet", "--save-result", str(path), *more]
        command += [f"--random-input-len={inputs}", f"--random-output-len={outputs}"]
        command.append(f"--num-prompts={requests}")
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            raise RuntimeError(f"{ended.stdout[-300:]}{ended.stderr[-600:]}")
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def _figures(url: str, engines: int, asked: argparse.Namespace) -> list[str]:
    """The cells of a row behind its name."""
    found = _bench(url, asked.long, 1, PROMPTS * engines, "--seed", "1")
    prompts = f"{found['total_input_tokens'] / found['duration']:,.0f}"
    most = f"--max-concurrency={CONCURRENCY * engines}"
    found = _bench(url, asked.input, asked.output, asked.requests * engines, most)
    cells = [prompts, f"{found['request_throughput']:.2f}"]
    cells += [f"{found[name]:.2f}" for name in ("mean_ttft_ms", "median_itl_ms", "p99_itl_ms")]
    if not asked.rate:
        return cells
    requests, rate = round(10 * asked.rate), f"--request-rate={asked.rate}"
    found = _bench(url, asked.input, asked.output, requests, rate, "--seed", "3")
    names = ("mean_ttft_ms", "mean_tpot_ms", "p99_itl_ms")
    return [*cells, *(f"{found[name]:.2f}" for name in names)]


def study(asked: argparse.Namespace) -> bool:
    """Whether all could be measured."""
    cards, started = Cards(asked.cards, len(asked.cases)), threading.Barrier(len(asked.cases))

    def measure(of: Case, taken: list[int]) -> bool:
        flags = [*of.flags, *asked.flags]
        try:
            with server_in_turn(of.model, of.layout, cards, taken, flags, started) as server:
                cells = [of.name, *_figures(server.url, of.layout.data, asked)]
        except (ServerFailed, OSError, RuntimeError) as failure:
            print(f"{of.name}: {failure}", flush=True)
            return False
        cells += [""] * (len(_COLUMNS) - len(cells))
        print(f"| {' | '.join(cells)} |", flush=True)
        return True

    print(f"| {' | '.join(_COLUMNS)} |\n|{' --- |' * len(_COLUMNS)}", flush=True)
    with ThreadPoolExecutor(len(asked.cases)) as pool:
        ended = [pool.submit(measure, one, cards.take(one.layout.cards)) for one in asked.cases]
    return all(one.result() for one in ended)


def main(arguments: Sequence[str]) -> int:
    own, flags = list(arguments), list[str]()
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = _parser()
    asked = parser.parse_args(own)
    if (most := max(one.layout.cards for one in asked.cases)) > asked.cards:
        parser.error(f"--cards {asked.cards}: a layout needs {most}")
    asked.flags = flags
    return 0 if study(asked) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.partition("\n")[0])
    parser.add_argument("cases", type=case, nargs="+", metavar="MODEL:TPxPPxDP[:QUANTIZATION]")
    parser.add_argument("--cards", type=integer(1, 64), default=1, metavar="N")
    parser.add_argument("--long", type=integer(1, 100_000), default=4096, metavar="TOKENS")
    parser.add_argument("--input", type=integer(1, 100_000), default=1024, metavar="TOKENS")
    parser.add_argument("--output", type=integer(1, 100_000), default=128, metavar="TOKENS")
    parser.add_argument(
        "--requests", type=integer(1, 100_000), default=256, metavar="N",
        help="of each engine, in the second load (default: 256)",
    )  # fmt: skip
    parser.add_argument(
        "--rate", type=number(0, 10_000), default=0, metavar="R",
        help="requests a second, for ten seconds; 0: no such load (default)",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
