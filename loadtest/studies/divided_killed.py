"""What the clients of a divided model see when one of its ranks is killed or stops.

    python -m penstock.loadtest.studies.divided_killed MODEL --cards 4 --layouts 2x1x1 1x2x1 \\
        -- --device cuda --dtype float32 --kv-cache-memory-bytes 20000000000

A layout is tensor x pipeline x data parallel size; everything behind ``--`` goes to ``penstock
serve``. All servers start at once; those that share cards are struck one after the other. While
``--streams`` run, SIGKILL or SIGSTOP goes to the first, middle or last rank; every stream must have
the tokens of a run in which nothing happens. Each case is a line, with the longest time between two
tokens, the time until all ranks were back, and what the cards of the engine had in use, which must
never be more than before. Exit codes: 0, 1 something was not as it must be, 2 wrong flags.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Self

from penstock.loadtest.options import integer
from penstock.loadtest.studies.divided_layout import Cards, Layout, layout
from penstock.loadtest.studies.divided_server import DividedServer, server_in_turn
from penstock.loadtest.studies.gpu_memory import MemoryWatch, memory_in_use
from penstock.loadtest.studies.kept_sessions import prompt_of, stream
from penstock.services.library.server_process import ServerFailed

ROLES = ("first", "middle", "last")
FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
STRIKE_AFTER = 5
"""Tokens of every stream."""
BACK_S = 150.0
MEMORY_MORE = 1.05
"""Times what was in use before: a third set of weights and KV memory would be far more."""


class Stream(threading.Thread):
    """One answer as its client sees it."""

    def __init__(self, url: str, prompt: list[int], count: int) -> None:
        super().__init__(daemon=True)
        self._url, self._prompt, self._count = url, prompt, count
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.error = ""

    def run(self) -> None:
        try:
            for at, event in stream(self._url, self._prompt, self._count, ids=True):
                if "choices" not in event:
                    raise RuntimeError(str(event))
                for choice in event["choices"]:
                    self.tokens += choice["token_ids"] or ()
                    self.times.append(at)
        except (OSError, RuntimeError, ValueError) as failure:
            self.error = repr(failure)

    def longest_pause(self) -> float:
        return max((after - one for one, after in itertools.pairwise(self.times)), default=0.0)


class Streams:
    """All of a run, which a ``with`` block begins."""

    def __init__(self, url: str, asked: argparse.Namespace) -> None:
        prompts = [prompt_of(asked.prompt_tokens, seed) for seed in range(asked.streams)]
        self._all = [Stream(url, prompt, asked.tokens) for prompt in prompts]

    def __enter__(self) -> Self:
        for one in self._all:
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._all:
            one.join()

    def await_tokens(self, count: int) -> None:
        while any(len(one.tokens) < count and one.is_alive() for one in self._all):
            time.sleep(0.001)

    def tokens(self) -> list[list[int]]:
        """Raises ``RuntimeError`` with the error of a stream that has one."""
        if errors := [one.error for one in self._all if one.error]:
            raise RuntimeError(f"{len(errors)} streams failed, as {errors[0]}")
        return [one.tokens for one in self._all]

    def longest_pause(self) -> float:
        return max(one.longest_pause() for one in self._all)


class Case(NamedTuple):
    role: str
    fault: str

    @classmethod
    def named(cls, text: str) -> Case:
        """A type for argparse: as ``first-killed``."""
        role, _, fault = text.partition("-")
        if role not in ROLES or fault not in FAULTS:
            raise argparse.ArgumentTypeError(
                f"{text}: expected one of {', '.join(ROLES)} with -{' or -'.join(FAULTS)}"
            )
        return cls(role, fault)

    def has_victim(self, layout: Layout) -> bool:
        """Two ranks have none in the middle."""
        return self.role != "middle" or layout.cards > 2


class Struck:
    """A server under streams, of which one rank after the other is lost."""

    def __init__(self, server: DividedServer, asked: argparse.Namespace) -> None:
        self._server, self._asked = server, asked
        with Streams(server.url, asked) as streams:
            pass
        self._undisturbed = streams.tokens()
        wrong = {len(one) for one in self._undisturbed} - {asked.tokens}
        if wrong:
            raise RuntimeError(f"answers of {wrong} tokens instead of {asked.tokens}")

    def strike(self, case: Case) -> bool:
        """Prints what came of it; whether all is as it must be. Raises ``RuntimeError`` and
        ``TimeoutError``."""
        before = self._server.workers()
        victim = self._victim(case.role)
        engine = self._server.engine_of(victim)
        with MemoryWatch() as watch:
            with Streams(self._server.url, self._asked) as streams:
                streams.await_tokens(STRIKE_AFTER)
                struck = time.perf_counter()
                os.kill(before[victim], FAULTS[case.fault])
            self._server.await_workers({before[rank] for rank in engine}, BACK_S)
            back = time.perf_counter() - struck
        pairs = zip(streams.tokens(), self._undisturbed, strict=True)
        same = sum(ours == theirs for ours, theirs in pairs)
        memory, is_free = self._memory(watch, engine)
        print(
            f"{self._server.layout}, {case.role} rank {case.fault}: {same} of "
            f"{len(self._undisturbed)} streams the same, longest pause "
            f"{streams.longest_pause():.1f} s, all back after {back:.1f} s{memory}",
            flush=True,
        )
        return same == len(self._undisturbed) and is_free

    def _victim(self, role: str) -> int:
        layout = self._server.layout
        return {"first": 0, "middle": layout.ranks // 2, "last": layout.cards - 1}[role]

    def _memory(self, watch: MemoryWatch, engine: range) -> tuple[str, bool]:
        """What is said of the engine's cards, and whether no more was in use than before."""
        if not watch.before:
            return "", True
        found = [
            [of_all[self._server.cards[rank]] for rank in engine]
            for of_all in (watch.before, watch.lowest, watch.highest)
        ]
        before, lowest, highest = map(max, found)
        told = f"; on a card at most {before:,} MiB before, {lowest:,} lowest, {highest:,} highest"
        return told, highest <= MEMORY_MORE * before


def study(asked: argparse.Namespace) -> bool:
    """Whether all was as it must be, with every layout."""
    cards, started = Cards(asked.cards, len(asked.layouts)), threading.Barrier(len(asked.layouts))

    def measure(of: Layout, taken: list[int]) -> bool:
        good = True
        try:
            with server_in_turn(asked.model, of, cards, taken, asked.flags, started) as server:
                struck = Struck(server, asked)
                for case in asked.cases:
                    if case.has_victim(of):
                        good &= struck.strike(case)
        except (ServerFailed, OSError, RuntimeError, KeyError) as failure:
            print(f"{of}: {failure!r}", flush=True)
            return False
        if server.left:
            print(f"{of}: left behind: {server.left}", flush=True)
        return good and not server.left

    before = memory_in_use()
    with ThreadPoolExecutor(len(asked.layouts)) as pool:
        ended = [pool.submit(measure, one, cards.take(one.cards)) for one in asked.layouts]
    if before:
        print(f"MiB in use on each card before all servers {before}, after them {memory_in_use()}")
    return all(one.result() for one in ended)


def main(arguments: Sequence[str]) -> int:
    own, flags = list(arguments), list[str]()
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = _parser()
    asked = parser.parse_args(own)
    if (most := max(one.cards for one in asked.layouts)) > asked.cards:
        parser.error(f"--cards {asked.cards}: a layout needs {most}")
    asked.flags = flags
    return 0 if study(asked) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.partition("\n")[0])
    parser.add_argument("model", help="folder of a checkpoint")
    parser.add_argument("--layouts", type=layout, nargs="+", required=True, metavar="TPxPPxDP")
    parser.add_argument(
        "--cards", type=integer(1, 64), default=1, metavar="N",
        help="GPUs, or on CPUs ranks that one server may have (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--cases", type=Case.named, nargs="+", metavar="ROLE-FAULT",
        default=[*(Case(role, "killed") for role in ROLES), Case("last", "stopped")],
        help="first-, middle- or last-, killed or stopped (default: each killed, the last stopped)",
    )  # fmt: skip
    parser.add_argument("--streams", type=integer(1, 1000), default=32, metavar="N")
    parser.add_argument("--prompt-tokens", type=integer(1, 100_000), default=20, metavar="N")
    parser.add_argument("--tokens", type=integer(10, 100_000), default=400, metavar="N")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
