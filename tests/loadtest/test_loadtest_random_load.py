"""Random load on a server, until its engine has made so many steps."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from support.pipeline.served import NULL, SharedServers

from penstock.loadtest.models.make_model import make_model
from penstock.loadtest.studies import random_load
from penstock.services.launcher.builtin_model import builtin_model


def test_random_load_ends_after_so_many_steps_and_every_request_is_answered(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    command = [sys.executable, "-m", "penstock.loadtest.studies.random_load", str(folder)]
    sizes = ["--steps", "100", "--clients", "6", "--longest", "64", "--limit", "90"]
    flags = ["--device", "null", "--null-step-ms", "1"]
    found = subprocess.run(
        [*command, *sizes, "--", *flags], capture_output=True, text=True, timeout=110
    )
    assert found.returncode == 0, found.stderr + found.stdout
    told = json.loads(found.stdout)
    assert told["steps"] >= 100
    assert told["requests"] > 0
    assert told["failed_steps"] == 0
    assert told["failures"] == []


def test_random_load_that_takes_too_long_says_so(
    shared_server: SharedServers,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, flags = shared_server(*NULL).url, []

    def own_server(arguments: list[str], on_line: object) -> AbstractContextManager[str]:
        flags.extend(arguments)
        return nullcontext(url)

    monkeypatch.setattr(random_load, "own_server", own_server)
    sizes = ["--steps", "1000000", "--clients", "1", "--longest", "8", "--limit", "1"]
    model = str(builtin_model())
    monkeypatch.setattr(sys, "argv", ["random_load", model, *sizes, "--", "--device", "null"])
    with pytest.raises(SystemExit) as ended:
        random_load.main()
    assert ended.value.code == 1
    assert "after 1 s" in json.loads(capsys.readouterr().out)["failures"][-1]
    assert flags == [model, "--device", "null"]
