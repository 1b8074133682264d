"""One client with the built-in model, whose processes others join."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest
from async_clients import SETTINGS

from penstock import LLM


@pytest.fixture(scope="package")
def llm() -> Iterator[LLM]:
    with LLM(**SETTINGS) as llm:
        yield llm
        launcher = psutil.Process(llm._server.process.pid)
        processes = [launcher, *launcher.children(recursive=True)]
    assert len(processes) > 5
    _, alive = psutil.wait_procs(processes, 10)
    assert not alive
