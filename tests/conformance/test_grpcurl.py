"""grpcurl, which knows a server by reflection alone, and its errors by their standard details.

`make conformance` installs it among the clients.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.pipeline.grpc_client import address_of
from support.pipeline.served import Served, served

GRPCURL = Path(__file__).resolve().parents[2] / "build/clients/bin/grpcurl"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not GRPCURL.exists(), reason="`make conformance` installs grpcurl"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    environment = {"PENSTOCK_API_KEY": '["a-key"]'}
    with served("--device", "cpu", "--grpc-port", "0", environment=environment) as server:
        yield server


def grpcurl(server: Served, what: str, body: Any = None, *flags: str) -> tuple[int, str]:
    """Exit code and output."""
    data = () if body is None else ("-d", json.dumps(body))
    words = (*flags, *data, address_of(server), *what.split())
    done = subprocess.run(
        [str(GRPCURL), "-plaintext", *words], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout + done.stderr


def test_services_and_messages_are_found_by_reflection(server: Served) -> None:
    _, listed = grpcurl(server, "list")
    assert {"penstock.v1.Penstock", "grpc.health.v1.Health"} <= set(listed.split())
    code, said = grpcurl(server, "describe penstock.v1.ChatRequest")
    assert code == 0
    assert "repeated .penstock.v1.Message messages = 2;" in said


def test_health_is_asked_without_a_key(server: Served) -> None:
    body = {"service": "penstock-demo"}
    assert "SERVING" in grpcurl(server, "grpc.health.v1.Health/Check", body)[1]


def test_a_chat_is_answered_and_errors_have_their_details(server: Served) -> None:
    key = ("-H", "authorization: Bearer a-key")
    body = {
        "messages": [{"role": "user", "content": "What is 17 + 25?"}],
        "sampling": {"temperature": 0, "max_tokens": 96},
        "options": {"stream": False},
    }
    code, said = grpcurl(server, "penstock.v1.Penstock/Chat", body, *key)
    assert code == 0, said
    assert "".join(delta.get("text", "") for delta in json.loads(said)["deltas"]) == "42"
    body["sampling"] = {"temperature": 300}
    code, said = grpcurl(server, "penstock.v1.Penstock/Chat", body, *key)
    assert code != 0
    assert "InvalidArgument" in said and '"field":"temperature"' in said.replace(" ", "")
    assert "Unauthenticated" in grpcurl(server, "penstock.v1.Penstock/Chat", body)[1]
