"""Models are loaded and unloaded again and again while processes are killed at random moments."""

from __future__ import annotations

import contextlib
import http.client
import random
import time
from pathlib import Path

import psutil
import pytest
from support.chaos.victims import children, is_ready
from support.pipeline.served import added_key, served
from test_pipeline_load_models import FLAGS, LOAD, UNLOAD, Setup

from penstock.loadtest.models.make_model import make_model

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]
ROUNDS = 20
LONGEST_PAUSE = 3.0
"""A load takes about as long on an idle machine."""
ROLES = ("router", "frontend", "tokenizer", "scheduler", "worker")


def killed(setup: Setup, rng: random.Random) -> str:
    """Kill one of the server's processes, mostly of the model that comes and goes. Returns its
    role."""
    role = rng.choice(ROLES)
    while True:  # who dies of itself meanwhile is no victim
        with contextlib.suppress(psutil.Error, ValueError):
            living = [psutil.Process(pid) for pid in children(setup.server)]
            victims = [one for one in living if setup.server.role_of(one) == role]
            youngest = max(victims, key=psutil.Process.create_time)
            rng.choice([*victims, youngest, youngest]).kill()
            return role


def state(setup: Setup) -> str:
    """Of the model that comes and goes; ``unknown`` where who would say was killed."""
    try:
        return setup.states().get("second", "gone")
    except (OSError, http.client.HTTPException, KeyError, ValueError):
        return "unknown"


def test_whatever_is_killed_a_load_and_an_unloading_come_to_an_end(tmp_path: Path) -> None:
    rng = random.Random(5)
    first = make_model(tmp_path / "models" / "first")
    make_model(tmp_path / "models" / "second", seed=1)
    root = added_key(tmp_path / "keys", "root", "admin")
    flags = ("--model-dirs", str(first.parent), "--keys-file", str(tmp_path / "keys"))
    seen: list[tuple[str, str, str]] = []
    with served(str(first), *FLAGS, *flags) as server:
        setup = Setup(server, first.parent, root, root)
        count = len(children(server))
        for _ in range(ROUNDS):
            assert setup.ask("POST", LOAD, {"model": "second"})[0] == 202
            time.sleep(rng.uniform(0.0, LONGEST_PAUSE))
            role = killed(setup, rng)
            setup.until(lambda: state(setup) in ("ready", "failed"), f"the load hangs: {role}")
            loaded = state(setup)
            setup.until(lambda: is_ready(server.url), f"not ready: {role}")
            assert setup.ask("POST", UNLOAD, {"model": "second"})[0] in (200, 202)
            time.sleep(rng.uniform(0.0, LONGEST_PAUSE))
            other = killed(setup, rng)
            setup.until(lambda: state(setup) == "gone", f"the unloading hangs: {other}")
            setup.until(lambda: len(children(server)) == count, "a process is left")
            setup.until(setup.all_ready, f"not ready: {other}")
            assert setup.served() == ["first"]
            assert setup.complete("first")[0] == 200
            seen.append((role, loaded, other))
        assert {loaded for _, loaded, _ in seen} == {"ready", "failed"}, seen
