"""A step that fails, once, in a real worker: its batch is tried again, and nobody loses a token."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.chaos.streams import Crowd, Followed, requests, undisturbed
from support.chaos.victims import children, nothing_held
from support.pipeline.reference_models import VOCABULARY, write_model
from support.pipeline.served import served


@pytest.mark.chaos
@pytest.mark.parametrize("action", ["oom", "raise"])
def test_a_step_without_memory_or_with_an_error_is_tried_again(action: str, tmp_path: Path) -> None:
    folder = write_model("qwen3", tmp_path / "tiny")
    flags = ["--device", "cpu", "--dtype", "float32", "--threads", "1", str(folder)]
    bodies = requests(
        8, seed=5, prompt_tokens=20, max_tokens=60, vocabulary=VOCABULARY, streamed=True
    )
    with served(*flags, "--fault", f"worker:{action}@step=12") as server:

        async def at_once() -> list[Followed]:
            async with Crowd(server.url, bodies) as crowd:
                return await crowd.ends()

        before = children(server)
        followed = asyncio.run(at_once())
        expected = asyncio.run(undisturbed(server.url, bodies))
        assert [one.verdict() for one in followed] == [one.verdict() for one in expected]
        assert children(server) == before
        nothing_held(server)
        assert server.metrics()["penstock_failed_steps_total"] == 1
        server.find("(on order at step)")
