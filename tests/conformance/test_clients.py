"""Clients from their registries work unchanged with a whole server, with each of its models.

The cases of each client are a file that runs where the client is installed and knows only the
address of a server: `clients/` in Python, `node/` in JavaScript. `make conformance` installs them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.conformance.encoder_folders import write_encoder
from support.pipeline.served import Served, served

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CLIENTS, NODE = HERE / "clients", HERE / "node"
CLIENT_PYTHON = ROOT / "build/clients/bin/python"
SMOLLM2 = os.environ.get("SMOLLM2_FOLDER", "")
KEY = "a-key"
ENCODER, RERANKER = "encoder", "reranker"
WITH_PENSTOCK = ("openai", "anthropic", "ollama")
"""Installed beside penstock; of the OpenAI SDK an older major version is among the others, too."""
OF_THEIR_OWN = tuple(sorted(
    path.name.removesuffix("_cases.py")
    for path in CLIENTS.glob("*_cases.py")
    if path.name.removesuffix("_cases.py") not in WITH_PENSTOCK[1:]
))  # fmt: skip
OF_NODE = tuple(sorted(path.name for path in NODE.glob("*.test.mjs")))
SECONDS = 1500.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    # Texts of two requests are the same bit for bit only in float32.
    models = {"penstock-demo": str(ROOT / "demo/model"), "smollm2": SMOLLM2}
    folder = tmp_path_factory.mktemp("encoders")
    models |= {ENCODER: str(write_encoder(folder / ENCODER))}
    models |= {RERANKER: str(write_encoder(folder / RERANKER, labels=1))}
    names = [name for name, folder in models.items() if folder]
    flags = [word for name in names for word in ("--served-model-name", name)]
    flags += ["--device", "cpu", "--dtype", "float32", "--api-key", KEY, "--grpc-port", "0"]
    with served(*(models[name] for name in names), *flags) as server:
        yield server


@pytest.fixture(params=["penstock-demo", "smollm2"])
def model(request: pytest.FixtureRequest) -> str:
    if request.param == "smollm2" and not SMOLLM2:
        pytest.skip("SMOLLM2_FOLDER names no folder with SmolLM2-135M-Instruct")
    return str(request.param)


def run(command: list[str], folder: Path, server: Served, model: str) -> None:
    """One client's cases; what they print is shown where one fails."""
    asked = {
        "PENSTOCK_URL": server.url,
        "PENSTOCK_GRPC": server.find(r'"grpc": "([^"]+)"'),
        "PENSTOCK_MODEL": model,
        "PENSTOCK_ENCODER": ENCODER,
        "PENSTOCK_RERANKER": RERANKER,
        "PENSTOCK_KEY": KEY,
    }
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **asked},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    print(done.stdout[-12_000:])
    assert done.returncode == 0


def run_cases(python: str, client: str, server: Served, model: str) -> None:
    cases = str(CLIENTS / f"{client}_cases.py")
    run([python, "-m", "pytest", "-c", str(CLIENTS / "pytest.ini"), cases], CLIENTS, server, model)


@pytest.mark.parametrize("client", WITH_PENSTOCK)
def test_a_client_that_penstock_is_developed_with_works(
    client: str, server: Served, model: str
) -> None:
    run_cases(sys.executable, client, server, model)


@pytest.mark.skipif(not CLIENT_PYTHON.exists(), reason="`make conformance` installs the clients")
@pytest.mark.parametrize("client", OF_THEIR_OWN)
def test_a_python_client_works_unchanged(client: str, server: Served, model: str) -> None:
    run_cases(str(CLIENT_PYTHON), client, server, model)


@pytest.mark.skipif(
    not (NODE / "node_modules").exists() or not shutil.which("node"),
    reason="`make conformance` installs the clients, where there is npm",
)
@pytest.mark.parametrize("cases", OF_NODE)
def test_a_node_client_works_unchanged(cases: str, server: Served, model: str) -> None:
    run(["node", "--test", cases], NODE, server, model)
