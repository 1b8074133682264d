"""``GET /v1/requests/{id}`` of a whole server while its engine computes a long prompt, and while
the scheduler that has it is killed; and the log's line of it."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest
from support.pipeline.served import Served, served
from support.polling import until

SLOW_PREFILL = (
    *("--device", "null", "--null-step-ms", "150", "--max-num-batched-tokens", "64"),
    *("--max-num-seqs", "1", "--log-format", "json"),
)
PROMPT_TOKENS = 1600


class Asked:
    """A request that runs beside the test."""

    def __init__(self, server: Served, name: str) -> None:
        body = {"prompt": [5] * PROMPT_TOKENS, "max_tokens": 3, "ignore_eos": True}
        self.answer: tuple[int, Any] | None = None

        def run() -> None:
            headers = {"x-request-id": name}
            self.answer = server.post("/v1/completions", body, headers)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def whole(self) -> tuple[int, Any]:
        self._thread.join(120)
        assert self.answer is not None
        return self.answer


def life(server: Served, name: str) -> dict[str, Any]:
    """What the route tells; nothing where the request has not come yet."""
    try:
        with urllib.request.urlopen(f"{server.url}/v1/requests/{name}", timeout=30) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 404:
            raise
        return {}


def until_told(server: Served, name: str, state: str, tokens: range) -> dict[str, Any]:
    """As an engine tells it, once it is in this state with so many prompt tokens computed."""

    def told() -> dict[str, Any] | None:
        found = life(server, name)
        is_told = found.get("told_by") == "engine" and found["state"] == state
        return found if is_told and found["prefilled_tokens"] in tokens else None

    found = until(told, 90, told=lambda: f"{name} is no {state}: {life(server, name)}")
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.chaos
def test_a_long_prefill_is_told_while_it_lasts_and_behind_the_loss_of_its_scheduler() -> None:
    with served(*SLOW_PREFILL) as server:
        first = Asked(server, "first")
        found = until_told(server, "first", "running", range(640, PROMPT_TOKENS))
        assert [one["state"] for one in found["states"]] == ["received", "queued", "running"]
        assert (found["prompt_tokens"], found["output_tokens"]) == (PROMPT_TOKENS, 0)
        assert (found["engine"], found["preemptions"], found["waits_for"]) == ("0", 0, None)
        second = Asked(server, "second")
        found = until_told(server, "second", "queued", range(1))
        assert (found["ahead"], found["waits_for"]) == (0, "slot")
        (victim,) = (
            one for one in server.processes().values() if server.role_of(one) == "scheduler"
        )
        victim.kill()
        victim.wait(30)
        found = until_told(server, "first", "running", range(1, 640))  # from its beginning
        assert found["output_tokens"] == 0
        for asked in (first, second):
            status, answer = asked.whole()
            assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
        line = json.loads(server.find(r'(\{[^\n]*"id":"first"[^\n]*"event":"request"[^\n]*\})'))
    assert line["prefill_ms"] > 0 and line["decode_ms"] > 0
