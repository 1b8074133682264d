"""Adapters take turns in the places of several engines, of several ranks, and beside a keeper."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.chaos.victims import find
from support.pipeline.adapter_folders import write_adapter
from support.pipeline.served import SMALL, Served, served

from penstock.loadtest.models.make_adapters import linear_sizes

pytestmark = pytest.mark.slow
PROMPT = "The water wheel turns because the mill race brings it water from the pond above the mill"
NAMES = [f"wheel-{number}" for number in range(8)]


def text(server: Served, name: str) -> str:
    body = {"model": name, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    status, found = server.post("/v1/completions", body)
    assert status == 200, found
    said: str = found["choices"][0]["text"]
    return said


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--data-parallel-size", "2"), id="engines"),
        pytest.param(("--tensor-parallel-size", "2"), id="ranks"),
        pytest.param(("--kv-tier-memory-bytes", "16777216"), id="keeper"),
    ],
)
def test_each_request_has_its_own_adapter_wherever_it_runs_and_whoever_dies(
    flags: tuple[str, ...], small_model: Path, tmp_path: Path
) -> None:
    lora: list[str] = []
    for seed, name in enumerate(NAMES):
        folder = write_adapter(tmp_path / name, linear_sizes(small_model), seed=seed)
        lora += ["--lora", f"{name}={folder}"]
    limits = ("--max-loras", "2", "--max-cpu-loras", "4", "--max-registered-loras", "8")
    names = random.Random(0).choices(["base", *NAMES], k=40)
    with (
        served(
            str(small_model), *SMALL, "--served-model-name", "base", *limits, *lora, *flags
        ) as server,
        ThreadPoolExecutor(len(names)) as pool,
    ):
        alone = {name: text(server, name) for name in ("base", *NAMES)}
        assert len(set(alone.values())) == len(alone)
        for deaths in (0, 1):
            texts = [pool.submit(text, server, name) for name in names]
            for _ in range(deaths):
                find(server, "worker").kill()
            assert [one.result() for one in texts] == [alone[name] for name in names]
