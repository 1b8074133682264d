"""Models that take turns on one device: requests for models at random, most of which sleep.

    python -m penstock.loadtest.studies.sleeping_models A B C --changes 100 -- --device cuda \\
        --load-format dummy --resident 1 --sleep-level 1 --hold-weights --min-awake-s 0

Everything behind ``--`` goes to ``penstock serve``. Requests of 16 tokens come one after another,
each for another model than the one before; with ``--at-once`` several at a time, for any models.
Shown are the requests that failed, the time to the first token of those for which a model had to
wake, and the mean time that waking took by the server's own account, from the third time on that
each model was asked for: by then all have been loaded and have slept.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import random
import sys
import threading
import time
from collections.abc import Sequence
from statistics import median
from urllib.parse import urlsplit

from penstock.loadtest.own_server import own_server
from penstock.loadtest.studies.kept_sessions import metric

WAIT_S = 300.0
TOKENS = 16
WARM_ROUNDS = 2


class Asked:
    """Answers so far."""

    def __init__(self, url: str) -> None:
        self._place = urlsplit(url)
        self.first: dict[str, str] = {}
        """The text of each model's first answer."""
        self.failed: list[str] = []
        self.others = 0
        """Answers with another text than the first one."""

    def ask(self, model: str) -> float:
        """Seconds until the first token."""
        began, first, text = time.perf_counter(), 0.0, ""
        body = {
            "model": model, "prompt": list(range(5, 133)), "max_tokens": TOKENS, "temperature": 0,
            "ignore_eos": True, "stream": True, "seed": 1,
        }  # fmt: skip
        connection = http.client.HTTPConnection(
            self._place.hostname or "", self._place.port, timeout=WAIT_S
        )
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(answer.read().decode(errors="replace"))
            for line in answer:
                if line.startswith(b"data: {"):
                    first = first or time.perf_counter() - began
                    text += "".join(each["text"] for each in json.loads(line[6:])["choices"])
        except (OSError, RuntimeError, KeyError, http.client.HTTPException) as failure:
            self.failed.append(f"{model}: {failure}")
            return 0.0
        finally:
            connection.close()
        self.others += self.first.setdefault(model, text) != text
        return first


def change(
    asked: Asked, names: Sequence[str], changes: int, at_once: int, seconds: float
) -> list[float]:
    """Times to the first token, of one request at a time."""
    rng, last, found = random.Random(31), "", list[float]()
    until = time.monotonic() + seconds
    while changes > 0 and time.monotonic() < until:
        if at_once > 1:
            chosen = [rng.choice(names) for _ in range(rng.randint(1, at_once))]
        else:
            chosen = [rng.choice([name for name in names if name != last])]
        threads = [threading.Thread(target=asked.ask, args=(name,)) for name in chosen[1:]]
        for one in threads:
            one.start()
        seconds = asked.ask(chosen[0])
        for one in threads:
            one.join()
        if len(chosen) == 1 and seconds:
            found.append(seconds)
        last, changes = chosen[-1], changes - len(set(chosen))
    return found


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 1 where a request has failed."""
    given = list(arguments)
    end = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--changes", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="none later than that")
    parsed = parser.parse_args(given[:end])
    names = [f"model-{number}" for number in range(len(parsed.folders))]
    named = [text for name in names for text in ("--served-model-name", name)]
    flags = [*parsed.folders, *named, *given[end + 1 :]]
    with own_server(flags) as url:
        asked = Asked(url)
        for number in range(WARM_ROUNDS):
            print(f"round {number}:", *(f"{asked.ask(name):.2f} s" for name in names), flush=True)
        before = [metric(url, f"penstock_model_wake_seconds_{part}") for part in ("sum", "count")]
        began = time.perf_counter()
        found = sorted(change(asked, names, parsed.changes, parsed.at_once, parsed.seconds))
        seconds = time.perf_counter() - began
        after = [metric(url, f"penstock_model_wake_seconds_{part}") for part in ("sum", "count")]
    total, count = (b - a for a, b in zip(before, after, strict=True))
    print(f"{count:.0f} times awake in {seconds:.1f} s, waking took {total / max(1, count):.3f} s")
    if found:
        p90, longest = found[int(0.9 * len(found))], found[-1]
        print(
            f"first token: median {median(found):.3f} s, p90 {p90:.3f} s, longest {longest:.3f} s"
        )
    print(f"{len(asked.failed)} requests failed", *asked.failed[:3])
    print(f"{asked.others} answers with another text than the first of their model")
    return bool(asked.failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
