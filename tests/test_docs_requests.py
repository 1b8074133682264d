"""Requests of the pages are answered by a server with the built-in model, as curl sends them."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from support.docs_examples import commands
from support.pipeline.served import BUILT_IN, SharedServers

OTHERS = {"README.md", "adapters.md", "pooling.md"}
"""Of the first there is a test; requests of the others need an administrator's key or a model of
another kind."""


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_each_request_of_the_pages_is_answered(shared_server: SharedServers) -> None:
    server = shared_server(*BUILT_IN)
    pages = set()
    for command in {one.words: one for one in commands() if one.page not in OTHERS}.values():
        if command.words[0] != "curl":
            continue
        words = [word.replace("http://127.0.0.1:8000", server.url) for word in command.words]
        done = subprocess.run(
            [*words, "--fail-with-body", "--silent", "--show-error", "--max-time", "60"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        pages.add(command.page)
    assert {"start.md", "structured-outputs.md", "prompt-caching.md"} <= pages
