"""Time to the first token of a long prompt: computed, kept in memory, and kept on disk.

    python -m penstock.loadtest.studies.kept_sessions FOLDER --tokens 38000 --disk EMPTY_FOLDER \\
        -- --device cuda --load-format dummy --num-kv-blocks 2600 --kv-tier-memory-bytes 17179869184

Everything behind ``--`` goes to ``penstock serve``; KV memory should hold one prompt and not two,
so that another prompt drives the first one out. Two servers run, one after the other, with one
folder on disk. Of each case the median of ``--rounds`` is shown, with new prompts where they are
computed; the text of the one prompt that is kept must be the same in all cases. ``--cold`` has the
system forget the files before the second server starts. With ``--beside N`` two cases are repeated
while so many streams decode, and their longest pause is shown.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import sys
import threading
import time
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from penstock.loadtest.own_server import own_server

WAIT_S = 120.0
_TEXT_TOKENS = 8


class First(NamedTuple):
    seconds: float
    """Until the first token."""
    text: str
    cached: int
    """Tokens of the prompt."""


def ask(url: str, prompt: Sequence[int], tokens: int = _TEXT_TOKENS) -> First:
    """One prompt, greedily. Raises ``RuntimeError`` for an error of the server's."""
    text, first, cached = [], 0.0, 0
    began = time.perf_counter()
    for at, event in stream(url, prompt, tokens):
        if event.get("usage"):
            cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        for choice in event["choices"]:
            first = first or at - began
            text.append(choice["text"])
    return First(first, "".join(text), cached)


def stream(
    url: str, prompt: Sequence[int], tokens: int, *, ids: bool = False
) -> Generator[tuple[float, dict[str, Any]], None, None]:
    """Events of a completion, and when they came. With ``ids`` there is one for every step, also
    where its tokens end no character."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=WAIT_S)
    body = {
        "model": "kept", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        "return_token_ids": ids,
    }  # fmt: skip
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(answer.read().decode(errors="replace"))
        for line in answer:
            if line.startswith(b"data: {"):
                yield time.perf_counter(), json.loads(line[6:])
    finally:
        connection.close()


def metric(url: str, name: str) -> float:
    """Summed over labels."""
    with urllib.request.urlopen(url + "/metrics", timeout=WAIT_S) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def await_stores(url: str) -> None:
    """Until nothing has been stored for a second."""
    name, stored, since = "penstock_kv_tier_stored_bytes_total", -1.0, time.monotonic()
    while time.monotonic() - since < 1.0:
        if (now := metric(url, name)) != stored:
            stored, since = now, time.monotonic()
        time.sleep(0.1)


class Pauses(threading.Thread):
    """A stream that decodes; its longest pause since ``begin``."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__(daemon=True)
        self._url, self._prompt = url, prompt_of(64, seed)
        self.longest = 0.0
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.is_set():
            last = 0.0
            with closing(stream(self._url, self._prompt, 1500)) as events:
                for at, _ in events:
                    self.longest = max(self.longest, at - last if last else 0.0)
                    last = at
                    if self.ended.is_set():
                        return


def prompt_of(tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(5, 205), k=tokens)


class Cases:
    """Measures, and prints, cases by name."""

    def __init__(self, tokens: int, rounds: int) -> None:
        self._tokens, self._rounds = tokens, rounds
        self.session = prompt_of(tokens, 0)
        self._others = iter(range(1, 1_000_000))
        self.texts: dict[str, str] = {}
        self.computed = 0.0
        self._streams: list[Pauses] = []

    def begin_streams(self, url: str, count: int) -> None:
        self._streams = [Pauses(url, -1 - each) for each in range(count)]
        for one in self._streams:
            one.start()

    def end_streams(self) -> None:
        for one in self._streams:
            one.ended.set()
        for one in self._streams:
            one.join(WAIT_S)
        self._streams.clear()

    def other(self) -> list[int]:
        """A prompt that nobody has asked for."""
        return prompt_of(self._tokens, next(self._others))

    def computed_each_time(self, url: str) -> None:
        found = [self._measured(url, self.other()) for _ in range(self._rounds)]
        self.computed = self._show("computed", found)

    def computed_and_kept(self, url: str) -> None:
        first = self._measured(url, self.session)
        self.texts["computed"] = first[0].text
        self._show("computed, to be kept", [first])
        self.texts["engine's cache"] = ask(url, self.session).text

    def kept(self, url: str, where: str, rounds: int | None = None) -> None:
        found = []
        for number in range(rounds or self._rounds):
            if number or where != "disk":
                ask(url, self.other(), 1)  # drives the session out
            found.append(self._measured(url, self.session))
        if not self._streams:  # beside others, bfloat16 may be rounded in another way
            self.texts[where] = found[-1][0].text
        self._show(where, found)

    def _measured(self, url: str, prompt: Sequence[int]) -> tuple[First, float]:
        for one in self._streams:
            one.longest = 0.0
        first = ask(url, prompt)
        return first, max((one.longest for one in self._streams), default=0.0)

    def _show(self, name: str, found: list[tuple[First, float]]) -> float:
        seconds = median(first.seconds for first, _ in found)
        share = f", {seconds / self.computed:.1%} of computed" if self.computed else ""
        pause = f", longest pause of others {max(pause for _, pause in found) * 1e3:.1f} ms"
        each = " ".join(f"{first.seconds:.3f}" for first, _ in found)
        cached = found[-1][0].cached
        beside = f" beside {len(self._streams)} streams" if self._streams else ""
        print(
            f"{name}{beside}: {seconds:.3f} s ({each}){share}, {cached} tokens cached"
            + (pause if self._streams else ""),
            flush=True,
        )
        return seconds


def forget_files(folder: Path) -> None:
    """Have the system drop what it holds of the files."""
    for path in folder.rglob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--disk", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=38_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", type=int, default=0)
    parser.add_argument("--cold", action="store_true")
    given = list(sys.argv[1:] if arguments is None else arguments)
    end = given.index("--") if "--" in given else len(given)
    parsed, serve = parser.parse_args(given[:end]), given[end + 1 :]
    flags = [
        str(parsed.folder), "--served-model-name", "kept", *serve,
        "--kv-tier-disk", str(parsed.disk),
    ]  # fmt: skip
    cases = Cases(parsed.tokens, parsed.rounds)
    with own_server(flags) as url:
        ask(url, cases.other())
        cases.computed_each_time(url)
        cases.computed_and_kept(url)
        await_stores(url)
        cases.kept(url, "memory")
        if parsed.beside:
            computed = cases.computed
            cases.begin_streams(url, parsed.beside)
            cases.computed_each_time(url)
            cases.kept(url, "memory")
            cases.end_streams()
            cases.computed = computed
        await_stores(url)
    if parsed.cold:
        forget_files(parsed.disk)
    with own_server(flags) as url:
        ask(url, prompt_of(min(2000, parsed.tokens), -1))
        cases.kept(url, "disk", 1)
    same = len(set(cases.texts.values())) == 1
    print("the same text everywhere" if same else f"texts differ: {cases.texts}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
