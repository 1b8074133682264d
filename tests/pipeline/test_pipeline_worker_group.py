"""An engine of three ranks of which one is killed while it serves."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest
from support.pipeline.in_process import called
from support.pipeline.served import Served, served

STREAMS = 6
TOKENS = 75


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(
        "--device", "null", "--tensor-parallel-size", "3", "--null-step-ms", "20"
    ) as running:
        yield running


def workers(server: Served) -> dict[int, int]:
    """Pids by rank."""
    found = {}
    for process in server.processes().values():
        if server.role_of(process) == "worker":
            number = re.search(r"worker.*? (\d+)", " ".join(process.cmdline()))
            assert number is not None
            found[int(number[1])] = process.pid
    return found


class Stream(threading.Thread):
    """The text of one completion, as it comes."""

    def __init__(self, server: Served, number: int) -> None:
        super().__init__()
        body = {
            "prompt": [5, 6, 7, number], "max_tokens": TOKENS, "ignore_eos": True, "seed": number,
            "temperature": 1.0, "stream": True,
        }  # fmt: skip
        self._request = urllib.request.Request(
            server.url + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        self.events = 0
        self.text = ""
        self.reason: str | None = None
        self.start()

    def run(self) -> None:
        with urllib.request.urlopen(self._request, timeout=60) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    self.events += 1
                    self.text += choice["text"]
                    self.reason = choice["finish_reason"]


def texts(server: Served, victim: int | None = None) -> list[str]:
    """The texts of all streams; the worker of rank ``victim`` is killed when every one runs."""
    streams = [Stream(server, number) for number in range(STREAMS)]
    if victim is not None:
        while not all(stream.events > 3 for stream in streams):
            time.sleep(0.01)
        before = workers(server)
        os.kill(before[victim], 9)
    for stream in streams:
        stream.join()
    assert [stream.reason for stream in streams] == ["length"] * STREAMS
    if victim is not None:
        after = workers(server)
        assert after.keys() == before.keys()
        assert not set(after.values()) & set(before.values()), "all ranks have begun anew"
    return [stream.text for stream in streams]


@pytest.fixture(scope="module")
def undisturbed(server: Served) -> list[str]:
    return texts(server)


@pytest.mark.parametrize("rank", [pytest.param(1, marks=pytest.mark.slow), 0])
def test_streams_end_with_the_same_text_when_a_rank_is_killed(
    server: Served, undisturbed: list[str], rank: int
) -> None:
    assert texts(server, victim=rank) == undisturbed


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--tensor-parallel-size", "3"), "sizes that work: 1, 2"),
        (("--pipeline-parallel-size", "99"), "stages work"),
        (("--model-impl", "transformers", "--tensor-parallel-size", "2"), "families of our own"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_with_what_works(
    flags: tuple[str, ...], words: str
) -> None:
    done = called("serve", "--device", "cpu", *flags)
    assert done.returncode
    assert " ".join(flags[-2:]) in done.stderr and words in done.stderr
