"""Two models share one place while processes are killed at random moments, mostly while one falls
asleep or wakes: each request ends with its text or with an error that says when to come again."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.chaos.victims import children, nothing_held, whole_again
from support.pipeline.served import Served, served

from penstock.loadtest.models.make_model import make_model

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]
ROUNDS = 25
LONGEST_PAUSE = 3.0
"""A model falls asleep and another one wakes within about as long on an idle machine."""
ROLES = ("router", "tokenizer", "scheduler", "worker", "worker")


def asked(server: Served, model: str) -> tuple[int, Any, str | None]:
    """Status, body and ``Retry-After`` of a completion."""
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 40, "ignore_eos": True, "seed": 7}
    request = urllib.request.Request(
        server.url + "/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=240) as answer:
            return answer.status, json.load(answer), None
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error), error.headers["Retry-After"]


def struck(server: Served, rng: random.Random) -> str:
    """Kill a process of some role, the youngest one mostly. Returns the role."""
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        role = rng.choice(ROLES)
        with contextlib.suppress(psutil.Error, ValueError):  # who ends of itself is no victim
            living = [psutil.Process(pid) for pid in children(server)]
            victims = [one for one in living if server.role_of(one) == role]
            youngest = max(victims, key=psutil.Process.create_time)
            rng.choice([*victims, youngest]).kill()
            return role
    raise AssertionError("nobody is there to be killed")


def test_whatever_is_killed_every_request_ends_and_both_models_wake_again(tmp_path: Path) -> None:
    rng = random.Random(8)
    folders = [str(make_model(tmp_path / name, seed=n)) for n, name in enumerate("ab")]
    flags = ("--resident", "1", "--min-awake-s", "0.5", "--restart-wait-s", "60")
    null = ("--device", "null", "--null-step-ms", "15")
    texts: dict[str, str] = {}
    refused: list[str] = []
    with served(*folders, *null, *flags) as server:
        count = len(children(server))
        for model in "ab":
            status, body, _ = asked(server, model)
            assert status == 200, body
            texts[model] = body["choices"][0]["text"]
        answers: list[tuple[str, int, Any, str | None]] = []

        def ask(model: str) -> None:
            answers.append((model, *asked(server, model)))

        for number in range(ROUNDS):
            names = rng.choices("ab", k=4)
            threads = [threading.Thread(target=ask, args=(name,)) for name in names]
            for thread in threads:
                thread.start()
            time.sleep(rng.uniform(0.0, LONGEST_PAUSE))
            role = struck(server, rng)
            for thread in threads:
                thread.join(300)
                assert not thread.is_alive(), f"a request hangs: {role} in round {number}"
        for model, status, body, again in answers:
            if status == 200:
                assert body["choices"][0]["text"] == texts[model]
            else:
                assert (status, again is not None) == (503, True), body
                refused.append(body["error"]["message"])
        whole_again(server, [], count, time.monotonic())
        for model in "ab":
            assert asked(server, model)[:1] == (200,)
        assert len(refused) < len(answers) / 10, refused
        nothing_held(server)
