"""A server for the attacks of each file, with keys or without, and again without assertions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Served, SharedServers, served
from siege import FLAGS, KEYS, WAYS, Attacker, besieged, peaceful_text

from penstock.loadtest.make_model import make_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=512)


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: "without_asserts" if way else "plain")
def server(request: pytest.FixtureRequest, folder: Path, shared_server: SharedServers) -> Served:
    return shared_server(str(folder), *FLAGS, environment={"PYTHONOPTIMIZE": request.param})


@pytest.fixture(scope="module")
def peace(server: Served) -> str:
    return peaceful_text(Attacker(server))


@pytest.fixture
def attack(server: Served, peace: str) -> Iterator[Attacker]:
    with besieged(Attacker(server), peace) as attacker:
        yield attacker


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: "without_asserts" if way else "plain")
def locked_server(request: pytest.FixtureRequest, folder: Path) -> Iterator[Served]:
    environment = {"PYTHONOPTIMIZE": request.param}
    keys = [f"--api-key={key}" for key in KEYS]
    with served(str(folder), *FLAGS, *keys, environment=environment) as running:
        yield running


@pytest.fixture(scope="module")
def locked_peace(locked_server: Served) -> str:
    return peaceful_text(Attacker(locked_server, KEYS))


@pytest.fixture
def locked(locked_server: Served, locked_peace: str) -> Iterator[Attacker]:
    """An attack on a server that asks for keys."""
    with besieged(Attacker(locked_server, KEYS), locked_peace) as attacker:
        yield attacker
