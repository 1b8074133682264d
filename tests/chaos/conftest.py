"""What the chaos tests share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chaos.states import FLAGS
from support.pipeline.reference_models import write_model
from support.pipeline.served import Served, SharedServers, served

Report = Callable[..., None]


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """Adds a line of JSON to the file that CHAOS_REPORT names, if it names one."""

    def write(**figures: Any) -> None:
        if path := os.environ.get("CHAOS_REPORT"):
            with Path(path).open("a") as file:
                print(json.dumps({"case": request.node.name, **figures}), file=file)

    return write


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory, shared_server: SharedServers) -> Served:
    """One of everything, with a tiny model on the CPU and steps of few tokens. It is whole again
    after each test."""
    folder = write_model("qwen3", tmp_path_factory.mktemp("models") / "tiny")
    return shared_server(*FLAGS, str(folder))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two of everything but the router, with a tiny model on the CPU."""
    folder = write_model("qwen3", tmp_path_factory.mktemp("models") / "tiny")
    flags = ["--device", "cpu", "--dtype", "float32", "--threads", "1", "--max-num-seqs", "40"]
    flags += ["--data-parallel-size", "2", "--frontends", "2", "--tokenizers", "2", str(folder)]
    with served(*flags) as running:
        yield running
