"""A server for the attacks of each file, with keys or without, and again without assertions."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pipeline.served import Served, SharedServers, served
from support.security.siege import FLAGS, KEYS, WAYS, Attacker, besieged, peaceful_text

from penstock.loadtest.models.make_model import make_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=512)


@pytest.fixture(scope="session")
def canary() -> Iterator[socket.socket]:
    """Whoever wants to call another host is sent here."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: "without_asserts" if way else "plain")
def server(
    request: pytest.FixtureRequest,
    folder: Path,
    canary: socket.socket,
    shared_server: SharedServers,
) -> Served:
    away = f"http://127.0.0.1:{canary.getsockname()[1]}"
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy",
             "HF_ENDPOINT", "HF_INFERENCE_ENDPOINT")  # fmt: skip
    environment = {"PYTHONOPTIMIZE": request.param, **dict.fromkeys(names, away)}
    return shared_server(str(folder), *FLAGS, environment=environment)


@pytest.fixture(scope="session")
def texts() -> dict[Served, str]:
    """The innocent text of each server, which it has told before anybody attacked it."""
    return {}


@pytest.fixture(scope="module")
def peace(server: Served, texts: dict[Served, str]) -> str:
    if server not in texts:
        texts[server] = peaceful_text(Attacker(server))
    return texts[server]


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
