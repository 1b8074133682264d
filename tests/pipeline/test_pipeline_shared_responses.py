"""Responses that any of several frontends finds, whichever of them has kept them."""

from __future__ import annotations

import os
from pathlib import Path

from served import served

FRONTENDS = 3
ROUNDS = 12
"""Each on a connection of its own, which any frontend may take."""


def test_a_response_is_known_to_every_frontend_of_a_server_and_ends_with_it(
    tmp_path: Path,
) -> None:
    place = tmp_path / "run"
    flags = ("--device", "null", "--frontends", str(FRONTENDS), "--runtime-dir", str(place))
    with served(*flags) as server:
        body = {"model": "penstock-demo", "input": "hello", "max_output_tokens": 2}
        status, first = server.post("/v1/responses", body)
        assert status == 200, first
        latest = first["id"]
        for _ in range(ROUNDS):
            status, answer = server.post("/v1/responses", {**body, "previous_response_id": latest})
            assert status == 200, answer
            latest = answer["id"]
            assert answer["previous_response_id"]
        kept = list(place.rglob("*.response"))
        assert len(kept) == ROUNDS + 1
        assert all(os.stat(path).st_mode & 0o077 == 0 for path in kept)
        server.stop()
    assert not list(place.rglob("*.response"))
