"""``deterministic: true`` where no engine can promise it: a 400 says which can, in each API."""

from __future__ import annotations

from typing import Any

import pytest
from support.pipeline.served import NULL, Served, SharedServers

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server(shared_server: SharedServers) -> Served:
    return shared_server(*NULL)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 2}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 16}),
        ("/v1/messages", {**CHAT, "model": "penstock-demo"}),
    ],
)
def test_it_is_refused_by_name_and_taken_without(
    path: str, body: dict[str, Any], server: Served
) -> None:
    status, answer = server.post(path, {**body, "deterministic": True})
    said = answer["error"]["message"]
    assert status == 400, answer
    assert said.startswith("deterministic is true, and no engine of the model 'penstock-demo' rep")
    assert "--deterministic" in said and "--dtype float32" in said
    assert server.post(path, {**body, "deterministic": False})[0] == 200
