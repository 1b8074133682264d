"""Whether a model that is divided among GPUs gives the answers of one worker.

    python -m penstock.loadtest.studies.divided_equal MODEL --cards 4 --share 4 \\
        --layouts 4x1x1 1x4x1 2x2x1 2x1x2 1x1x4 -- --device cuda --kv-cache-memory-bytes 2000000000

A layout is tensor x pipeline x data parallel size; everything behind ``--`` goes to ``penstock
serve``. Each layout has a server in float32 and one in bfloat16, and so has one worker. In float32
greedy tokens must be those of one worker. In either type, log-probabilities of given tokens (those
of the prompts) are compared with one worker's in float32: in bfloat16 they may differ by twice what
those of one worker do. Exit codes: 0, 1 an answer differs or a server failed, 2 wrong flags.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from penstock.loadtest.offline.offline_requests import draw_requests, moved
from penstock.loadtest.options import integer, length_range
from penstock.loadtest.studies.divided_layout import ONE, Cards, Layout, layout
from penstock.loadtest.studies.divided_server import MODEL, divided_server
from penstock.loadtest.studies.kept_sessions import stream
from penstock.protocol.model_info import read_model_info
from penstock.services.library.server_process import ServerFailed

DTYPES = ("float32", "bfloat16")
FACTOR = 2.0
"""Of the differences of one worker in bfloat16."""
_WAIT_S = 120.0


class Answers(NamedTuple):
    tokens: list[list[int]]
    """Drawn greedily, of each prompt."""
    logprobs: list[float]
    """Of all prompts' tokens behind their first."""
    start_s: float
    seconds: float


class Case(NamedTuple):
    layout: Layout
    dtype: str

    def __str__(self) -> str:
        return f"{self.layout}, {self.dtype}"


REFERENCE, ROUNDED = Case(ONE, "float32"), Case(ONE, "bfloat16")


class Comparison:
    """Answers of all cases as they come, from any thread, and whether all are as they must be."""

    def __init__(self) -> None:
        self._found: dict[Case, Answers] = {}
        self._told: set[Case] = set()
        self._lock = threading.Lock()
        self.good = True

    def add(self, case: Case, answers: Answers) -> None:
        """Print this case, and those that have waited for it, once one worker's are there."""
        with self._lock:
            self._found[case] = answers
            if REFERENCE in self._found and ROUNDED in self._found:
                for one in [each for each in self._found if each not in self._told]:
                    self._told.add(one)
                    print(self._line(one), flush=True)

    def fail(self, case: Case, why: object) -> None:
        with self._lock:
            self.good = False
            print(f"{case}: {why}", flush=True)

    def _line(self, case: Case) -> str:
        found = self._found[case]
        took = f"({found.start_s:.1f} s to start, {found.seconds:.1f} s to answer)"
        mean, most = self._differences(case)
        told = (
            f"{len(found.logprobs)} logprobs differ by {mean:.6f} in the mean, {most:.6f} at most"
        )
        if case.dtype == REFERENCE.dtype:
            pairs = zip(found.tokens, self._found[REFERENCE].tokens, strict=True)
            equal = sum(ours == theirs for ours, theirs in pairs)
            self.good &= equal == len(found.tokens)
            return f"{case}: {equal} of {len(found.tokens)} answers the same, {told} {took}"
        own_mean, own_most = self._differences(ROUNDED)
        self.good &= mean <= FACTOR * own_mean and most <= FACTOR * own_most
        ratios = f"{_ratio(mean, own_mean):.2f} and {_ratio(most, own_most):.2f} of one worker's"
        return f"{case}: {told}, {ratios} {took}"

    def _differences(self, case: Case) -> tuple[float, float]:
        """Of its logprobs from the reference's: mean and largest."""
        pairs = zip(self._found[case].logprobs, self._found[REFERENCE].logprobs, strict=True)
        found = [abs(ours - theirs) for ours, theirs in pairs]
        return sum(found) / len(found), max(found)


def _ratio(value: float, own: float) -> float:
    return value / own if own else float(value > 0)


def _tokens(url: str, prompt: list[int], count: int) -> list[int]:
    events = stream(url, prompt, count, ids=True)
    return [
        token
        for _, event in events
        for choice in event["choices"]
        for token in choice["token_ids"] or ()
    ]


def _logprobs(url: str, prompt: list[int]) -> list[float]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 0, "prompt_logprobs": 0}
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_WAIT_S) as answer:
        (choice,) = json.load(answer)["choices"]
    return [
        place[str(token)]["logprob"]
        for token, place in zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
    ]


def _asked(url: str, prompts: list[list[int]], count: int) -> tuple[list[list[int]], list[float]]:
    """Greedy tokens of each prompt, all at once, and the prompts' logprobs."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        tokens = list(pool.map(lambda prompt: _tokens(url, prompt, count), prompts))
        logprobs = list(pool.map(lambda prompt: _logprobs(url, prompt), prompts))
    wrong = [len(one) for one in tokens if len(one) != count]
    if wrong:
        raise RuntimeError(f"answers of {wrong} tokens instead of {count}")
    return tokens, [value for one in logprobs for value in one]


def _measure(
    case: Case, taken: list[int], cards: Cards, asked: argparse.Namespace, found: Comparison
) -> None:
    """A server of one case, from its start to its end."""
    began = time.perf_counter()
    flags = ["--dtype", case.dtype, *asked.flags]
    try:
        with divided_server(asked.model, case.layout, taken, flags) as server:
            start_s = time.perf_counter() - began
            with cards.alone(taken):
                began = time.perf_counter()
                answers = _asked(server.url, asked.prompts, asked.output_len)
            found.add(case, Answers(*answers, start_s, time.perf_counter() - began))
    except (ServerFailed, OSError, RuntimeError, ValueError, KeyError) as failure:
        found.fail(case, failure)
    finally:
        cards.give_back(taken)


def compare(asked: argparse.Namespace) -> bool:
    """Whether every server has answered as it must. Those of one worker start first."""
    layouts = [ONE, *(one for one in asked.layouts if one != ONE)]
    cases = [Case(one, dtype) for one in layouts for dtype in DTYPES]
    cards, found = Cards(asked.cards, asked.share), Comparison()
    with ThreadPoolExecutor(len(cases)) as pool:
        for case in cases:
            pool.submit(_measure, case, cards.take(case.layout.cards), cards, asked, found)
    return found.good


def main(arguments: Sequence[str]) -> int:
    own, flags = list(arguments), list[str]()
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = _parser()
    asked = parser.parse_args(own)
    if (most := max(one.cards for one in asked.layouts)) > asked.cards:
        parser.error(f"--cards {asked.cards}: a layout needs {most}")
    drawn = draw_requests(asked.num_prompts, asked.input_len, (1, 1), asked.seed)
    asked.prompts = moved(drawn.prompts, 0, read_model_info(asked.model).vocab_size)
    asked.flags = flags
    return 0 if compare(asked) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.partition("\n")[0])
    parser.add_argument("model", help="folder of a checkpoint")
    parser.add_argument("--layouts", type=layout, nargs="+", required=True, metavar="TPxPPxDP")
    parser.add_argument(
        "--cards", type=integer(1, 64), default=1, metavar="N",
        help="GPUs, or on CPUs ranks that may run at a time (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--share", type=integer(1, 64), default=1, metavar="N",
        help="servers that may be on a card at a time, of which one is asked (default: 1)",
    )  # fmt: skip
    parser.add_argument("--num-prompts", type=integer(1, 1000), default=24, metavar="N")
    parser.add_argument("--input-len", type=length_range, default=(20, 300), metavar="LOW:HIGH")
    parser.add_argument("--output-len", type=integer(1, 100_000), default=40, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
