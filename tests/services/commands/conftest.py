"""One server for all tests of commands: the built-in model on a device that takes 5 ms a
step. It makes vectors too."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.pipeline.served import Served, SharedServers


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, shared_server: SharedServers) -> Served:
    folder = tmp_path_factory.mktemp("run")
    environment = {"XDG_RUNTIME_DIR": str(folder)}
    flags = ("--device", "null", "--null-step-ms", "5", "--pooling", "last")
    return shared_server(*flags, environment=environment)


@pytest.fixture
def short_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For sockets, whose paths may be no longer than 107 bytes."""
    return tmp_path_factory.mktemp("r")
