"""A whole server that keeps KV blocks in shared memory and on disk: same text, less prefill."""

from __future__ import annotations

import json
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pipeline.served import BUILT_IN, Served, served
from support.polling import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMITS = (*BUILT_IN, "--num-kv-blocks", "64", "--max-model-len", "512")
PROMPTS = [[(7 * i + 13 * k) % 200 + 5 for i in range(300)] for k in range(5)]
"""Three of them fill KV memory."""
FOUND = 288
"""Tokens of a prompt in whole blocks, but the last one."""


def flags(folder: Path, *more: str) -> tuple[str, ...]:
    disk = folder / "kv"
    return (*LIMITS, "--kv-tier-disk", str(disk), "--kv-tier-memory-bytes", str(64 << 20), *more)


def ask(server: Served, prompt: list[int], **more: Any) -> tuple[str, int]:
    """Text, and tokens that were cached."""
    body = {"model": "penstock-demo", "prompt": prompt, "max_tokens": 8, "temperature": 0, **more}
    request = urllib.request.Request(
        server.url + "/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        found = json.load(answer)
    usage = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found["choices"][0]["text"], usage


def ask_all(server: Served, **more: Any) -> tuple[list[str], list[int]]:
    answers = [ask(server, prompt, **more) for prompt in PROMPTS]
    return [text for text, _ in answers], [cached for _, cached in answers]


def metric_reaches(server: Served, metric: str, least: float) -> None:
    until(
        lambda: server.metrics().get(metric, 0.0) >= least,
        told=lambda: f"{metric} stays below {least}",
    )


def files(folder: Path) -> list[Path]:
    return sorted((folder / "kv").rglob("*.kv"))


def times_killed(server: Served, process: str) -> int:
    return len(re.findall(rf'"{process}[ 0]* was killed by SIGKILL', server.output))


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """What the prompts are answered with where nothing is kept."""
    with served(*LIMITS) as plain:
        return ask_all(plain)[0]


def test_text_is_the_same_from_memory_after_a_restart_and_with_damaged_files(
    tmp_path: Path, texts: list[str]
) -> None:
    with served(*flags(tmp_path)) as server:
        for _ in range(2):
            assert ask_all(server)[0] == texts
        assert ask_all(server) == (texts, [FOUND] * 5)
        metric_reaches(server, "penstock_kv_tier_hit_blocks_total", 5 * FOUND / 16)
        metric_reaches(server, "penstock_kv_tier_used_bytes", 1)
        assert ask_all(server, cache_salt="another")[1] == [0] * 5
    assert len(files(tmp_path)) >= 5 * FOUND // 16
    with served(*flags(tmp_path)) as server:
        assert ask_all(server) == (texts, [FOUND] * 5)
        assert ask_all(server, cache_salt="third")[1] == [0] * 5
    for number, path in enumerate(files(tmp_path)):
        content = bytearray(path.read_bytes())
        content[200] ^= 1
        path.write_bytes(content if number % 2 else content[:300])
    with served(*flags(tmp_path)) as server:
        found, cached = ask_all(server)
        assert found == texts
        assert cached == [0] * 5
        metric_reaches(server, "penstock_kv_tier_corrupted_total", 5)


def test_all_of_a_long_prompt_but_its_end_comes_from_disk_after_a_restart(tmp_path: Path) -> None:
    long = [(7 * i) % 200 + 5 for i in range(1900)]
    sizes = ("--num-kv-blocks", "256", "--max-model-len", "2048", *BUILT_IN)
    kept = (*sizes, "--kv-tier-disk", str(tmp_path / "kv"), "--kv-tier-store-after", "1")
    with served(*kept) as server:
        text, _ = ask(server, long, max_tokens=1)
        metric_reaches(server, "penstock_kv_tier_used_bytes", 1)
        slot_bytes = files(tmp_path)[0].stat().st_size
        metric_reaches(server, "penstock_kv_tier_stored_bytes_total", len(long) // 16 * slot_bytes)
    assert len(files(tmp_path)) == len(long) // 16, "what is stored is written before the end"
    with served(*kept) as server:
        again, cached = ask(server, long, max_tokens=1)
    assert (again, cached) == (text, 1888)


def test_a_prompt_is_stored_where_it_is_retained_and_loaded_ahead_of_its_use(
    tmp_path: Path, texts: list[str]
) -> None:
    ahead = {"max_tokens": 0, "cache_control": {"type": "ephemeral"}}
    with served(*flags(tmp_path)) as server:
        assert ask(server, PROMPTS[0], **ahead) == ("", 0)
        metric_reaches(server, "penstock_kv_tier_used_bytes", 1)
        slot_bytes = files(tmp_path)[0].stat().st_size
        metric_reaches(server, "penstock_kv_tier_stored_bytes_total", FOUND // 16 * slot_bytes)
    with served(*flags(tmp_path)) as server:
        assert ask(server, PROMPTS[0], cache_salt="another", **ahead) == ("", 0)
        assert ask(server, PROMPTS[0], **ahead) == ("", FOUND)
        metric_reaches(server, "penstock_kv_tier_hit_blocks_total", FOUND / 16)
        assert ask(server, PROMPTS[0]) == (texts[0], FOUND)
        assert server.metrics()["penstock_kv_tier_hit_blocks_total"] == FOUND / 16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_text_on_a_gpu_is_the_same_from_its_cache_from_memory_and_after_a_restart(
    tmp_path: Path, dtype: str
) -> None:
    kept = flags(tmp_path, "--device", "cuda", "--dtype", dtype)
    with served(*kept) as server:
        first, cached = (ask(server, PROMPTS[0]) for _ in range(2))
        assert (first[1], cached[1]) == (0, FOUND)
        computed = [ask_all(server)[0] for _ in range(2)]
        texts, found = ask_all(server)
        assert found == [FOUND] * 5
        metric_reaches(server, "penstock_kv_tier_hit_blocks_total", 5 * FOUND / 16)
        metric_reaches(server, "penstock_kv_tier_used_bytes", 1)
    assert texts[0] == cached[0], "the end of a prompt is computed in the same way"
    if dtype == "float32":
        assert [[first[0], *texts[1:]], *computed] == [texts] * 3
    with served(*kept) as server:
        assert ask_all(server) == (texts, [FOUND] * 5)


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("killed", "point"),
    [
        ("keeper", "TierStored=2"),
        ("keeper", "TierGet=2"),
        ("worker", "KVCopies=2"),
        ("worker", "KVCopies=5"),
    ],
)
def test_a_kill_in_the_middle_of_copies_costs_no_request_and_no_text(
    tmp_path: Path, texts: list[str], killed: str, point: str
) -> None:
    """Each process that takes the place of the killed one is killed there again."""
    with served(*flags(tmp_path, "--fault", f"{killed}:kill@{point}")) as server:
        for _ in range(4):
            assert ask_all(server)[0] == texts
        assert times_killed(server, killed) > 0


@pytest.mark.chaos
@pytest.mark.parametrize("killed", ["scheduler", "router"])
def test_a_kill_while_prompts_are_stored_and_loaded_costs_no_request_and_no_text(
    tmp_path: Path, texts: list[str], killed: str
) -> None:
    with served(*flags(tmp_path)) as server, ThreadPoolExecutor(1) as thread:
        for what in ("stored_bytes", "hit_blocks"):
            metric = f"penstock_kv_tier_{what}_total"
            before = server.metrics().get(metric, 0.0)
            rounds = [thread.submit(ask_all, server) for _ in range(4)]
            metric_reaches(server, metric, before + 1)
            for process in server.processes().values():
                if server.role_of(process) == killed:
                    process.kill()
            assert [one.result()[0] for one in rounds] == [texts] * 4
        assert times_killed(server, killed) == 2
