"""The client that docs/grpc.md shows works as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.pipeline.grpc_client import address_of
from support.pipeline.served import BUILT_IN, Served, SharedServers, served

PAGE = (Path(__file__).resolve().parent.parent / "docs/grpc.md").read_text()


ANSWER = r".*\S.*\n\d+ tokens\n"


def printed(server: Served, key: str) -> str:
    """What the client of the page prints."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(code.splitlines()) <= 21
    text = code.replace("127.0.0.1:50051", address_of(server)).replace('"KEY"', f'"{key}"')
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_client_of_the_page_prints_an_answer_and_its_usage(
    shared_server: SharedServers,
) -> None:
    assert re.match(ANSWER, printed(shared_server(*BUILT_IN), "KEY"), re.DOTALL)


@pytest.mark.slow
def test_the_client_of_the_page_needs_the_key() -> None:
    with served(
        "--device", "null", "--grpc-port", "0", environment={"PENSTOCK_API_KEY": '["KEY"]'}
    ) as server:
        assert re.match(ANSWER, printed(server, "KEY"), re.DOTALL)
        assert printed(server, "other").startswith("UNAUTHENTICATED The API key")
