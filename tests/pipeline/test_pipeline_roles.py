"""A whole server whose engines compute prompts or go on with them: the text of one engine."""

from __future__ import annotations

import json
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.pipeline.served import BUILT_IN, Served, served
from test_pipeline_kv_tiers import metric_reaches, times_killed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMITS = (*BUILT_IN, "--num-kv-blocks", "512", "--max-model-len", "1024")
ROLES = (
    *("--prefill-engines", "1", "--decode-engines", "1", "--max-local-prefill-length", "64"),
    *("--kv-tier-memory-bytes", str(64 << 20)),
)
PROMPTS = [[(7 * i + 13 * k) % 200 + 5 for i in range(300 + 90 * k)] for k in range(5)]
OUTPUT = 120


def ask(server: Served, number: int, **more: Any) -> tuple[str, str]:
    """Text, and the id of the request."""
    sampled = {"temperature": 0.8, "seed": 11} if number % 2 else {"temperature": 0}
    body = {
        "model": "penstock-demo",
        "prompt": PROMPTS[number],
        "max_tokens": OUTPUT,
        "ignore_eos": True,
        **sampled,
        **more,
    }
    request = urllib.request.Request(
        server.url + "/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)["choices"][0]["text"], answer.headers["x-request-id"]


def ask_all(server: Served, **more: Any) -> list[tuple[str, str]]:
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        asked = [threads.submit(ask, server, number, **more) for number in range(len(PROMPTS))]
        return [one.result() for one in asked]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """What the prompts are answered with by one engine."""
    with served(*LIMITS) as plain:
        return [ask(plain, number)[0] for number in range(len(PROMPTS))]


def test_text_is_that_of_one_engine_and_hand_overs_are_seen(texts: list[str]) -> None:
    with served(*LIMITS, *ROLES) as server:
        answers = ask_all(server)
        assert [text for text, _ in answers] == texts
        lives = []
        for _, name in answers:
            with urllib.request.urlopen(f"{server.url}/v1/requests/{name}", timeout=60) as answer:
                lives.append(json.load(answer))
        went = [life for life in lives if life["engine"] == "0,1"]
        assert went
        assert all(life["hand_over_ms"] is not None for life in went)
        assert all(life["continuations"] == 0 for life in lives)
        metric_reaches(server, "penstock_hand_overs_total", len(went))
        metric_reaches(server, "penstock_hand_over_seconds_count", len(went))
        metric_reaches(server, "penstock_kv_tier_hit_blocks_total", len(went) * 300 // 16)
        metrics = server.metrics()
        assert metrics["penstock_hand_over_bytes_total"] > 0
        assert metrics.get("penstock_continuations_total", 0.0) == 0


@pytest.mark.chaos
@pytest.mark.parametrize("moment", ["kv_tier_stored_bytes_total", "hand_overs_total"])
@pytest.mark.parametrize(
    "victim", ["scheduler 0", "worker 0", "scheduler 1", "worker 1", "keeper", "router"]
)
def test_a_kill_of_either_side_costs_no_request_and_no_text(
    texts: list[str], victim: str, moment: str
) -> None:
    service, _, number = victim.partition(" ")
    named = re.compile(rf"{service}( --number)? {number}" if number else service)
    with served(*LIMITS, *ROLES) as server, ThreadPoolExecutor(2) as threads:
        rounds = [threads.submit(ask_all, server, cache_salt=f"{moment} {k}") for k in range(2)]
        metric_reaches(server, f"penstock_{moment}", 1)
        for process in server.processes().values():
            if named.search(" ".join(process.cmdline())):
                process.kill()
        assert [[text for text, _ in one.result()] for one in rounds] == [texts] * 2
        assert times_killed(server, service) or f"{victim} was killed by SIGKILL" in server.output
        again = ask_all(server, cache_salt="again")
        assert [text for text, _ in again] == texts
