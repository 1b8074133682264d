"""One client with the built-in model, whose processes others join."""

from __future__ import annotations

from contextlib import ExitStack

import psutil
import pytest
from support.library.async_clients import SETTINGS

from penstock import LLM


@pytest.fixture(scope="session")
def llm(group: ExitStack) -> LLM:
    llm = LLM(**SETTINGS)
    group.callback(end_with_its_processes, llm)
    return llm


def end_with_its_processes(llm: LLM) -> None:
    with llm:
        launcher = psutil.Process(llm._server.process.pid)
        processes = [launcher, *launcher.children(recursive=True)]
    assert len(processes) >= 5
    _, alive = psutil.wait_procs(processes, 10)
    assert not alive
